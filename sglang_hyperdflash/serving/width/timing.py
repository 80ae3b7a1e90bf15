"""Times decode rounds by batch size and width, once when a server starts.

The rounds are real ones, of made-up greedy and sampled requests. All of these requests lie in row 0
of SGLang's request pool, and so in K/V slot 0: what captured graphs pad their batches with. No
request is ever given either, so nothing has to be put back.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.utils.common import DynamicGradMode, require_mlp_tp_gather

from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.serving.width.policy import CostTable, WidthController
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

logger = logging.getLogger(__name__)

# Tokens of each made-up context.
CONTEXT = 128
# Timings of a cell, of which the shortest counts; on a GPU each is of several rounds in a row, so
# that launches overlap with earlier rounds as they do while serving.
TIMINGS, IN_A_ROW = 3, 4
# Batch sizes grow by this factor, up to the most requests or until so many seconds are spent.
GROWTH, LIMIT = 4, 10.0
# Odd and larger than most vocabularies' small factors: anchors differ, so experts do, too.
STRIDE = 7919


def sizes_up_to(most: int) -> list[int]:
    """Batch sizes to time: powers of ``GROWTH``, and ``most``."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * GROWTH, most))
    return sizes


def time_rounds(
    runners: Runners,
    run: Callable[[ScheduleBatch], Any],
    controller: WidthController,
    share: Callable[[list[float]], list[float]] | None = None,
) -> CostTable:
    """Time every width of ``controller.setting`` at growing batch sizes; the same on all ranks.

    Args:
        runners: with their pools and graphs. run: launches a round of a batch.
        controller: its ``forced`` width is set, and None afterwards.
        share: sends rank 0's numbers to every rank and returns them; None without other ranks.

    Raises:
        HyperDFlashConfigError: a batch that may be served does not fit in memory.
    """
    runner, widths = runners.target, controller.setting.widths
    costs, spent, before = CostTable(widths), 0.0, 0.0
    in_a_row = 1 if runners.device == "cpu" else IN_A_ROW
    most = int(runner.max_running_requests)
    if not get_moe_a2a_backend().is_none():  # dispatch buffers hold the captured batches
        most = min(most, getattr(runner.decode_cuda_graph_runner, "max_bs", 1))
    for requests in sizes_up_to(most):
        row = []
        for sampled in (False, True):
            batch = made_up_batch(runner, requests, sampled)
            for width in widths:
                controller.forced = width
                try:
                    row.append(_seconds(runners.device, run, batch, in_a_row))
                except torch.OutOfMemoryError as error:
                    raise HyperDFlashConfigError(
                        f"decoding {requests} requests with {width} rows each needs more GPU "
                        "memory than is left. Lower --max-running-requests or "
                        "--mem-fraction-static."
                    ) from error
                finally:
                    controller.forced = None
        row = share(row) if share else row
        costs.add(requests, row)
        # By the shared numbers, so that all ranks stop here.
        taken = sum(row) * (1 + TIMINGS * in_a_row)
        spent += taken
        growth = min(taken / before, GROWTH) if before else 1.0
        if spent + growth * taken > LIMIT:
            break
        before = taken
    logger.info(
        f"HYPERDFLASH: timed rounds of widths {widths} with {costs.sizes[0]} to {costs.sizes[-1]} "
        f"requests in {spent:.1f} s"
    )
    return costs


@DynamicGradMode()
def _seconds(
    device: str, run: Callable[[ScheduleBatch], Any], batch: ScheduleBatch, rounds: int
) -> float:
    """Seconds of one round, after one that builds what is built at first use."""
    synchronize = torch.get_device_module(device).synchronize
    run(copy(batch))
    measured = []
    for _ in range(TIMINGS):
        synchronize()
        started = time.perf_counter()
        for _ in range(rounds):
            run(copy(batch))
        synchronize()
        measured.append((time.perf_counter() - started) / rounds)
    return min(measured)


def made_up_batch(runner: Any, requests: int, sampled: bool) -> ScheduleBatch:
    """A batch about to be decoded, as ``Scheduler.run_batch`` hands it to a worker.

    Seams: ``ReqToTokenPool.req_to_token`` (its row 0 pads batches, and names K/V slot 0, which the
    allocators never give away); ``DFlashDraftInputV2``.
    """
    device, vocabulary = runner.device, runner.model_config.vocab_size
    length = min(CONTEXT, runner.model_config.context_len // 4)
    # A seed of its own: none is drawn that a later request would have had.
    parameters = SamplingParams(temperature=float(sampled), sampling_seed=0)
    reqs = []
    for i in range(requests):
        req = Req(f"round {i}", "", array("q", [0] * length), parameters, vocab_size=vocabulary)
        req.kv.req_pool_idx = 0
        req.kv.kv_committed_len = req.kv.kv_allocated_len = length
        reqs.append(req)
    batch = ScheduleBatch.init_new(
        reqs,
        runner.req_to_token_pool,
        runner.token_to_kv_pool_allocator,
        None,
        runner.model_config,
        not runner.server_args.disable_overlap_schedule,
        runner.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices = torch.zeros(requests, dtype=torch.int64, device=device)
    batch.req_pool_indices_cpu = torch.zeros(requests, dtype=torch.int64)
    batch.seq_lens = torch.full((requests,), length, dtype=torch.int64, device=device)
    batch.seq_lens_cpu = torch.full((requests,), length, dtype=torch.int64)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = requests * length
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocabulary)
    batch.spec_info = DFlashDraftInputV2.create_idle_input(device=device)
    anchors = torch.arange(requests, dtype=torch.int64, device=device) * STRIDE % vocabulary
    batch.spec_info.bonus_tokens, batch.spec_info.new_seq_lens = anchors, batch.seq_lens
    batch.spec_info.nxt_kv_lens_cpu = batch.seq_lens_cpu.clone()
    batch.spec_info.nxt_kv_lens_sum = batch.seq_lens_sum
    if get_parallel().attn_dp_enabled:  # every rank runs such a batch; seam: ``dp_attn``
        ranks = get_parallel().attn_dp_size if require_mlp_tp_gather() else 1
        batch.global_num_tokens = batch.global_num_tokens_for_logprob = [requests] * ranks
        batch.is_extend_in_batch, batch.can_run_decode_cuda_graph = False, True
    return batch
