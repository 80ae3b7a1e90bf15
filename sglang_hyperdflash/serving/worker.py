"""The HYPERDFLASH worker: SGLang's DFLASH worker with a round of its own, the same at every width.

Kept from the parent class: what it constructs (model runners, pools, graphs, the fused draft K/V
write). :meth:`HyperDFlashWorker.decode` is a round, step by step; the parts that it calls are next
to this file. A prefill draws and counts its token in SGLang's sampler (hooks of
``verification/prefill``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, compute_position
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.speculative.base_spec_worker import HiCacheDraftPlan
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _DflashDraftSampler
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils import async_h2d, is_cuda

from sglang_hyperdflash.seams import check_installed
from sglang_hyperdflash.serving.batch import BatchRequests, RequestState, prepare_block
from sglang_hyperdflash.serving.draft_kv.attention import bound_graph_buffers
from sglang_hyperdflash.serving.draft_kv.draft_kv import DraftKV, WindowedDraftKV
from sglang_hyperdflash.serving.drafting.copies import CopyHistory
from sglang_hyperdflash.serving.drafting.draft_step import DraftStep
from sglang_hyperdflash.serving.drafting.replace import read_drafter, rebuild
from sglang_hyperdflash.serving.record.start import start_recording
from sglang_hyperdflash.serving.runners import Runners, from_all_ranks
from sglang_hyperdflash.serving.scheduler.metrics import Metrics
from sglang_hyperdflash.serving.settings import FULL, WIDTH, WidthSetting, read_settings
from sglang_hyperdflash.serving.startup.operators import check_operators
from sglang_hyperdflash.serving.startup.pair import check_pair, check_processors, log_ready
from sglang_hyperdflash.serving.verification import prefill
from sglang_hyperdflash.serving.verification.exact import Committed
from sglang_hyperdflash.serving.verification.grammar import pass_by_failed
from sglang_hyperdflash.serving.verification.rehearsal import verification_peak
from sglang_hyperdflash.serving.verification.verifier import Verifier
from sglang_hyperdflash.serving.width.lanes import Lanes
from sglang_hyperdflash.serving.width.policy import WidthController
from sglang_hyperdflash.serving.width.ranks import RanksPolicy
from sglang_hyperdflash.serving.width.timing import time_rounds
from sglang_hyperdflash.targets.shared_residual import SharedResidual
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops.copies import KINDS

logger = logging.getLogger(__name__)
# The width policy's classes: greedy and sampled, of each the kinds of match and "not known": there
# was none yet, but one may have come since the host last read it.
UNKNOWN = KINDS
CLASSES = 2 * (UNKNOWN + 1)


def block_fits(committed_lens: Iterable[int], in_flight: int, block: int, context: int) -> bool:
    """Whether a whole block ends before the last position of every request's context.

    Rounds of width 1 then fit as well: SGLang ends a request two tokens before its context's end,
    and runs it once more at most. ``in_flight`` is the width of the round that may still run.
    """
    return max(committed_lens) + in_flight + block < context


@dataclass
class Round:
    """A launched round without a result.

    Attributes:
        reqs: SGLang's requests. width: rows of each. classes: of each, for the width policy.
        best: the policy's width when it was launched; a wider round was a probe.
        observed: whether the width policy counts it: not once the drafter has been replaced.
        copies: what ``CopyHistory.end`` returned.
    """

    reqs: list[Any]
    width: int
    classes: list[int]
    best: int | None = None
    observed: bool = True
    copies: torch.Tensor | None = None


class HyperDFlashWorker(DFlashWorkerV2):
    """Registered under ``HYPERDFLASH``; drives overlap and synchronous scheduling alike.

    Attributes:
        block: rows of a whole block, the drafter's own. The scheduler reserves slots for it in
            every round, whatever the width.
        runners: both models' runners, which the parts of a round read.
        request_state, draft_step, verifier, draft_kv, lanes, width_control: the parts of a round.
        recorder: keeps the residual of some requests for training, or None.
        metrics: counts rounds; None in a scheduler that exports nothing.
        rounds: those that SGLang has no result of yet, oldest first.
    """

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        check_installed()
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.runners = runners = Runners.of(self)
        check_pair(runners)
        self.block, config = runners.block, self.draft_model.hyperdflash_config
        settings = read_settings(self.block, config.causal)
        settings.check_ranks_agree(from_all_ranks)
        self._overlap = not server_args.disable_overlap_schedule
        self._prefills_only = server_args.disaggregation_mode == "prefill"
        self._width_1_allowed = not width_1_impossible()
        check_processors(self._width_1_allowed, server_args.enable_custom_logit_processor)
        # Without rounds of width 1 requests end early (``dflash_seams.end_requests_early``), or the
        # round that ends one, and the one in flight, would pass its context's end.
        target_worker.rows_past_the_end = 0 if self._width_1_allowed else 2 * self.block

        self.draft_kv = (DraftKV if runners.window is None else WindowedDraftKV)(
            runners, settings.pool_ratio
        )
        self.request_state = RequestState(runners.target, target_worker.random_seed, self.device)
        if runners.window is not None:
            self.request_state.on_arrival = self.draft_kv.arrive
        self.draft_step = DraftStep(runners, settings.draft_temperature)
        self.verifier = Verifier(runners)
        prefill.install(prefill.PrefillSampler(runners.target, self.request_state, self.verifier))
        width, wrapped = settings.width, get_exec().overlap.enable_two_batch_overlap
        if width.mode != FULL and (wrapped or ranks_may_part()):
            width = WidthSetting(FULL, (self.block,))
        if wrapped and width.widths != (self.block,):
            raise HyperDFlashConfigError(
                f"{WIDTH}={width.widths[0]} does not work with --enable-two-batch-overlap, "
                f"where rounds verify {self.block} rows. Unset it, or drop the flag."
            )
        alone, policy = get_parallel().tp_size == 1, None
        if get_parallel().attn_dp_enabled:
            policy = partial(RanksPolicy, copies=get_parallel().attn_tp_size)
        self.width_control = WidthController(width, self.block, alone, UNKNOWN + 1, policy)
        self._copy_length = 0 if self._prefills_only else settings.copy_length
        # The kind of match of each request in the rounds that the host has read.
        self._kinds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.history: CopyHistory | None = None
        self.lanes = Lanes(
            runners,
            self.draft_step.buffers,
            self.draft_kv.build_context,
            width.widths,
            # For custom logit processors and the ends of contexts.
            eager=(1,) if self._width_1_allowed else (),
        )
        self._last_width = self.block
        self.metrics: Metrics | None = None
        self.rounds: deque[Round] = deque()
        self.draft_model.replacing = self._replacing_weights
        self.recorder = start_recording(settings.recording, runners)
        # The target's graphs are captured later.
        runners.target.capture_tail_hooks.append(SharedResidual())
        if is_cuda():  # before a graph holds a kernel
            self._check_operators()
        log_ready(runners, self._fused_kv_helper is not None, width)

    def _check_operators(self) -> None:
        # Rounds of width 1 come with every setting: custom processors, the ends of contexts.
        widths = {1} if self._prefills_only else {1, *self.width_control.setting.built(self.block)}
        check_operators(
            self.draft_model,
            self.draft_step.candidates,
            self.runners.vocabulary,
            sorted(widths),
            self.block - 1 if self._copy_length else 0,
            from_all_ranks,
        )

    # A forward pass.

    def forward_batch_generation(
        self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """One round, or a prefill; seam: ``DFlashWorkerV2.forward_batch_generation``."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self.prefill(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        if batch.forward_mode.is_idle():
            return self._idle(batch, on_publish, grammar_barrier)
        return self.decode(batch, on_publish, grammar_barrier)

    def _idle(self, batch, on_publish, barrier) -> GenerationBatchResult:
        """A round of an attention data-parallel rank without requests, as wide as the others'.

        Seam: ``DFlashWorkerV2.block_size``, the rows of its idle verification.
        """
        self.request_state.current = None
        width = self.width_control.next()
        self.lanes.activate(width)
        self.block_size = width
        try:
            return super().forward_batch_generation(batch, on_publish, barrier)
        finally:
            self.block_size = self.block

    def decode(self, batch, on_publish, barrier) -> GenerationBatchResult:
        """One round: draft, verify, commit.

        The host only launches; it waits for the device with a grammar (step 4), and with a windowed
        drafter whose attention plans on the host (step 2).

        Args:
            batch: a decoding ``ScheduleBatch`` whose ``spec_info`` holds every request's anchor.
            on_publish: gets the new lengths ``[bs]`` as soon as they are launched, or None.
            barrier: SGLang's, or None; after it, grammars know the tokens of the last round.
        """
        # 0. The requests of the batch, and the round's width: rows of each, its anchor's too. The
        # width's lane puts its attention backends and CUDA graphs in both model runners.
        requests = self.request_state.begin(batch)
        classes = [self._class_of(req) for req in requests.reqs]
        lane = self.lanes.activate(self._choose_width(requests, classes))

        # 1. The block: anchors, mask tokens, positions, reserved K/V slots. The lengths, without
        # the anchors, are the last round's, maybe from another stream.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        translator = self.runners.target.kv_index_translator
        block = prepare_block(batch, lane.width, int(self._mask_token_id), translator)

        # 2. Draft width - 1 tokens of every request in one pass: argmaxes (greedy), else drawn from
        # the drafter's distribution q, kept in block.proposal; for a client's seed with the noise
        # that step 5 draws with. A copy may be drafted, or has a share of q.
        if self.history is not None:
            self.history.begin(requests, block)
        if lane.width > 1:
            context = self.draft_kv.context(batch, block)
            block = self.draft_step.draft(batch, block, context, requests, lane)
        # Grammars need the drafts on the host: their copy starts before the target runs.
        tree = GrammarTree.from_linear_chain(block.tokens) if batch.has_grammar else None

        # 3. Verify: one target pass over every token of the blocks.
        target = self.verifier.forward(batch, block)
        output = target.logits_output

        # 4. Make output's logits final, in place: grammar, penalties, bias, custom processors. A
        # greedy batch whose logits stay sharded over ranks has its argmaxes instead.
        argmaxes = self.verifier.finish_logits(batch, output, block, requests, tree, barrier)

        # 5. Accept a prefix of every block: drafts that equal the target's argmax (greedy), or the
        # token that the request's seed draws from the target's distribution p (seeded), or by
        # block verification of q against p (all others). Then the bonus token; rank 0 decides.
        committed = self.verifier.accept(output.next_token_logits, argmaxes, block, requests)
        self.verifier.add_logprobs(batch, output, committed, requests)
        new_seq_lens = batch.seq_lens + committed.accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)

        # 6. Reduce the target's residual to features; write draft K/V: anchors, accepted drafts.
        self.draft_kv.write(output.hidden_states, block, committed.accept_lens)
        if self.recorder is not None:
            self.recorder.decoded(batch, output, lane.width)
        output.hidden_states = None  # or overlap scheduling would copy it to the host

        # 7. Count tokens for penalties, and look for what the next round may copy. Acceptance is
        # counted in ``on_verify_complete_cpu``.
        self.request_state.count(requests, committed.tokens, committed.accept_lens)
        launched = Round(requests.reqs, lane.width, classes, self.width_control.best)
        if self.history is not None:
            read = self.width_control.policy is not None or self.metrics is not None
            launched.copies = self.history.end(requests, block, committed, read)
        self.rounds.append(launched)
        return self._result(target, committed, new_seq_lens, lane.width)

    def _class_of(self, req: Any) -> int:
        """The class of a request for the width policy."""
        sampled = req.sampling_params.top_k > 1
        return self._kinds.get(req, UNKNOWN) + (UNKNOWN + 1) * sampled

    def _choose_width(self, requests: BatchRequests, classes: list[int]) -> int:
        """The width of the round that starts: 1 where nothing may be drafted."""
        counts = [classes.count(number) for number in range(CLASSES)]
        if not self._width_1_allowed:
            width = self.width_control.next(*counts)
        else:
            context_length = self.runners.target.model_config.context_len
            committed_lens = (req.kv.kv_committed_len for req in requests.reqs)
            in_flight = self._last_width if self._overlap else 0
            # A processor is called once a token, as in the baseline.
            if requests.info.has_custom_logit_processor or not block_fits(
                committed_lens, in_flight, self.block, context_length
            ):
                width = 1
            else:
                width = self.width_control.next(*counts)
        self._last_width = width
        self.width_control.started(requests.reqs, width, *counts)
        return width

    def _result(
        self, target: Any, committed: Committed, new_seq_lens: torch.Tensor, width: int
    ) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=committed.tokens.flatten(),
            accept_lens=committed.accept_lens,
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=committed.next_anchors, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=width,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
            # What SGLang calls caps; ``scheduler/metrics`` counts drafts by them.
            cap_lens=torch.full((len(committed.accept_lens),), width, dtype=torch.int32),
        )

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int = 0
    ) -> None:
        """Count the oldest round, whose accepted drafts SGLang knows now.

        Seam: ``BaseSpecWorker.on_verify_complete_cpu``, called once a round in the rounds' order.
        """
        done = self.rounds.popleft()
        # As SGLang counts: with overlap a finished request runs once more.
        copies = [] if done.copies is None else done.copies.tolist()
        for req, (kind, _) in zip(done.reqs, copies, strict=False):
            # A single round without a match says little: the host reads it one round late.
            none = 0 if self._kinds.get(req) in (0, UNKNOWN) else UNKNOWN
            self._kinds[req] = kind or none
        each = zip(done.reqs, done.classes, num_correct_drafts_per_req, strict=True)
        live = [(c, n) for req, c, n in each if not (req.is_retracted or req.finished())]
        if done.observed:
            self.width_control.observe(done.width, live, done.best)
        if self.metrics is not None:
            self.metrics.add([n for _, n in live], done.width)
            copied = [n for _, n in copies]
            accepted = map(min, copied, num_correct_drafts_per_req)
            self.metrics.add_copies(sum(copied), sum(accepted))

    def load_drafter(self, folder: str, version: int) -> None:
        """Draft with the drafter of a folder from the next round on; the same on all ranks.

        Raises:
            HyperDFlashConfigError: it does not fit, or a rank cannot read it. No rank has changed.
        """
        self.draft_model.replace_weights(read_drafter(folder, self.draft_model, from_all_ranks))
        logger.info("HYPERDFLASH: drafting with version %d, of %s", version, folder)
        if self.metrics is not None:
            self.metrics.drafter_version.set(version)

    @contextmanager
    def _replacing_weights(self) -> Iterator[None]:
        """While the drafter's weights are replaced: between the round that may run and the next.

        Then derived values are rebuilt, and what was learnt of the old drafter is forgotten, its
        rounds without a result included. Rounds run on ``ModelRunner.forward_stream`` with overlap
        scheduling, else on the current stream.
        """
        device = torch.get_device_module(self.device)
        stream, current = self.model_runner.forward_stream, device.current_stream()
        stream.wait_stream(current)
        with torch.no_grad(), device.stream(stream):
            yield
            rebuild(self._fused_kv_helper, self.draft_model.layers)
            if self.history is not None:
                self.history.forget()
        current.wait_stream(stream)
        for launched in self.rounds:
            launched.observed = False
        if self.width_control.policy is not None:
            self.width_control.policy.forget()

    def prefill(
        self, batch, on_publish, grammar_barrier, pp_proxy_tensors
    ) -> GenerationBatchResult:
        """The target's pass over prompts, with the draft K/V of their tokens.

        Seam: the prefill of ``DFlashWorkerV2.forward_batch_generation``. The write comes at once:
        the scheduler may put the slots into the radix cache when this returns.
        """
        if batch.decoding_reqs and batch.has_grammar and grammar_barrier is not None:
            # A mixed batch draws the running requests' tokens under their grammars' masks.
            grammar_barrier()
            pass_by_failed(batch.decoding_reqs)
        # The hooks read ``request_state.current`` in SGLang's sampler, during the target's pass.
        self.request_state.begin(batch, prefill=True)
        self.lanes.activate(self.block)
        result = self.target_worker.forward_batch_generation(
            batch,
            pp_proxy_tensors=pp_proxy_tensors,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_kv_loc_plan=True,
        )
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        tokens = self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        if batch.forward_mode.is_idle():
            result.next_draft_input = DFlashDraftInputV2.create_idle_input(device=self.device)
            return result
        device = tokens.device
        positions, _ = compute_position(
            self.model_runner.prefill_attention_backend_str,
            async_h2d(batch.prefix_lens, dtype=torch.int32, device=device),
            async_h2d(batch.extend_lens, dtype=torch.int32, device=device),
            int(sum(batch.extend_lens)),
        )
        output = result.logits_output
        self.draft_kv.write_prefill(batch, output.hidden_states, plan, positions)
        if self.recorder is not None:
            self.recorder.prefilled(batch, output)
        output.hidden_states = None
        result.next_draft_input = self._make_next_draft_input_prefill(
            # A broken row (NaN, +inf) has a token past the vocabulary; an anchor must be embedded.
            bonus_tokens=tokens.masked_fill(tokens == self.runners.vocabulary, 0),
            seq_lens=batch.seq_lens,
        )
        return result

    @property
    def primary_draft_kv_pool(self) -> None:
        """None: no draft K/V are sent; each node's window holds what it computed."""

    def _build_hicache_draft_plan(self) -> HiCacheDraftPlan:
        """As SGLang's for K/V in the target's slots; a window stays on the device."""
        plan = super()._build_hicache_draft_plan()
        return plan if self.runners.window is None else HiCacheDraftPlan()

    # The start: overrides of ``DFlashWorkerV2``, in the order in which SGLang calls them.

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ) -> None:
        """Make the drafter's K/V pool, and what requests copy from."""
        self.draft_kv.allocate(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        if self._copy_length:
            target = self.runners.target
            slots = len(target.req_to_token_pool.req_to_token)
            most = min(self._copy_length, target.model_config.context_len + self.block)
            given = slots, most, self.block, self.runners.vocabulary, self.device
            # Captured batches are multiples of it, at most. Seam:
            # ``get_cuda_graph_batch_size_alignment``.
            self.history = CopyHistory(*given, padding=2 * get_parallel().tp_size)
            self.request_state.history = self.history
            self.draft_step.copies = self.history.copies

    def init_attention_backends(self) -> None:
        """The draft's backend is built here, its graph buffers later."""
        with self.draft_kv.build_context():
            super().init_attention_backends()
        bound_graph_buffers(self.draft_model_runner.attn_backend, self.block)

    def init_cuda_graphs(self) -> None:
        """The draft's graphs of the block, then the other widths' lanes, and the times of all."""
        with self.draft_kv.build_context():
            super().init_cuda_graphs()
        self.lanes.build(self._draft_sampler)
        if self.width_control.policy is not None and not self._prefills_only:
            self._time_rounds()

    def _time_rounds(self) -> None:
        """Time every width, for a policy that chooses between them, and forget these rounds.

        Seam: the tensor-parallel group of CPU tensors, which gives every rank rank 0's numbers.
        """
        group = get_parallel().tp_group
        share = partial(group.broadcast_object, src=0) if group.world_size > 1 else None
        timed = self.runners, self.forward_batch_generation, self.width_control
        self.width_control.policy.costs = time_rounds(*timed, share)
        self.request_state.current, self._last_width = None, self.block
        self.rounds.clear()
        if self.history is not None:
            self.history.forget()
        self.draft_kv.forget_padding()
        self.lanes.activate(self.block)
        if is_cuda():
            # Memory cached by these rounds is their stream's own: serving runs on another.
            torch.cuda.empty_cache()

    def _maybe_build_draft_sampler(self):
        """SGLang's own head in the draft's graph, where it builds one, becomes ours."""
        built = super()._maybe_build_draft_sampler()
        if type(built) is not _DflashDraftSampler:
            return built
        return self.draft_step.buffers(self.block, len(built.out) // (self.block - 1))

    def _prewarm_batch_size(self, block_size: int) -> int:
        """The most requests that are served: those past the captured batches verify eagerly."""
        most = self.model_runner.max_running_requests
        if not most or self._prefills_only:  # a prefill node verifies none
            return super()._prewarm_batch_size(block_size)
        return int(most)

    def _measure_sampling_peak(self, *, candidates, target_logits, sampling_info) -> int:
        """Rehearse our verification, not SGLang's."""
        renorm, k = self.verifier.renorm, self.draft_step.candidates
        return verification_peak(renorm, k, len(candidates), target_logits)

    def prewarm_sampling(self):
        """As SGLang's, with the counts of penalties: no request takes memory that a start did not.

        Raises:
            HyperDFlashConfigError: the largest batch does not fit.
        """
        try:
            _ = self.request_state.counts  # made at its first use
            return super().prewarm_sampling()
        except torch.OutOfMemoryError as error:
            requests = self._prewarm_batch_size(self.block)
            raise HyperDFlashConfigError(
                f"verifying {requests} sampled requests at once needs more GPU memory than is "
                "left. Lower --max-running-requests or --mem-fraction-static."
            ) from error


def ranks_may_part() -> bool:
    """Whether ranks of attention data parallelism may not run the same rounds, or come and go."""
    unheard = envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get()
    parts = unheard or get_exec().moe.elastic_ep_backend is not None
    return get_parallel().attn_dp_enabled and parts


def width_1_impossible() -> bool:
    """Whether no round can be narrowed to one row for one request.

    Ranks of attention data parallelism share a width, and two-batch overlap wraps the target's only
    attention backend.
    """
    return bool(get_parallel().attn_dp_enabled or get_exec().overlap.enable_two_batch_overlap)
