"""Verification: one target pass over every row of a block, the final logits, and what is accepted.

What changes the target's logits comes in the order of SGLang's baseline: penalties, grammar, bias,
custom processors. The grammar's mask is written first here: what is impossible stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_simulated_acceptance
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils import is_cuda

from sglang_hyperdflash.draft.adjust import adjust_rows
from sglang_hyperdflash.serving.batch import BatchRequests, Block
from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.serving.verification.exact import (
    Committed,
    Rows,
    filtered,
    lay_out_rows,
    read_rows,
    unpack,
    verify_block,
    weights_of,
)
from sglang_hyperdflash.serving.verification.grammar import block_mask

logger = logging.getLogger(__name__)


def renorm_kernels() -> tuple | None:
    """FlashInfer's top-k and top-p kernels on CUDA, else None.

    Deterministic ones: by default the order in which thread blocks end decides the last bits of
    their sums, and so which token top-p keeps last. Ranks would differ, and so would two runs of
    one seed.
    """
    from sglang.kernels.ops.sampling.renorm import top_k_renorm_prob, top_p_renorm_prob

    if not is_cuda():
        return None
    kernels = top_k_renorm_prob, top_p_renorm_prob
    return tuple(partial(kernel, is_deterministic=True) for kernel in kernels)


class Verifier:
    """Verifies one round at a time.

    Attributes:
        simulated: tokens of every round, to time a server without a trained drafter; off at 0 or
            below.
    """

    simulated = -1.0

    def __init__(self, runners: Runners) -> None:
        self.runners, self.vocabulary = runners, runners.vocabulary
        self.renorm = renorm_kernels()
        self.simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if self.simulated > 0:
            logger.warning("HYPERDFLASH: SGLANG_SIMULATE_ACC_LEN is set: all answers are made up")

    def forward(self, batch: Any, block: Block) -> Any:
        """The target's pass over the block; the batch's host lengths are left alone.

        Seam: the verify step of ``DFlashWorkerV2.forward_batch_generation``. With attention data
        parallelism an idle rank runs eagerly, so all of them do.
        """
        target, data_parallel = self.runners.target_worker, get_parallel().attn_dp_enabled
        verify = DFlashVerifyInput(
            draft_token=block.tokens.flatten(),
            positions=block.positions.flatten(),
            draft_token_num=block.width,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=block.plan,
        )
        lengths = batch.seq_lens_cpu, batch.seq_lens_sum
        if block.ends_cpu is not None:
            batch.seq_lens_cpu, batch.seq_lens_sum = block.ends_cpu, int(block.ends_cpu.sum())
        batch.out_cache_loc = block.slots
        forward_batch, _ = verify.prepare_for_verify(
            batch, target, defer_metadata_init=data_parallel
        )
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths
        if data_parallel:
            counts = forward_batch.original_global_num_tokens_cpu
            if counts is not None and min(counts) == 0:
                forward_batch.can_run_decode_cuda_graph = False
        return target.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=None if data_parallel else True,
        )

    def finish_logits(
        self,
        batch: Any,
        output: Any,
        block: Block,
        requests: BatchRequests,
        tree: GrammarTree | None,
        barrier: Callable[[], None] | None,
    ) -> torch.Tensor | None:
        """Make the target's logits ``[bs * width, V]`` final, in ``output``.

        Returns:
            argmaxes ``[bs * width]`` int64 of logits that stay in their vocabulary shards, all that
            a greedy batch needs; else None. Seam: ``DFlashWorkerV2._defer_target_verify_gather``.
        """
        processor = self.runners.logits_processor
        if processor is not None and processor.is_deferred_shard(output.next_token_logits):
            if requests.argmax_only and self.runners.can_skip_logits(batch, requests.info):
                argmaxes = processor.deferred_argmax(output.next_token_logits).long()
                output.next_token_logits = None
                return argmaxes
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        lay_out_rows(output)
        logits = output.next_token_logits
        if tree is not None:
            mask = block_mask(batch, tree, logits.device, barrier)
            if mask is not None:
                mask.apply(logits)
        changes = requests.changes()
        if changes is not None:
            by_block = logits.view(*block.tokens.shape, -1)
            adjust_rows(by_block, block.tokens, block.positions, *changes.tensors)
        if requests.info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, requests.info)  # such rounds have width 1
        return None

    def accept(
        self,
        logits: torch.Tensor | None,
        argmaxes: torch.Tensor | None,
        block: Block,
        requests: BatchRequests,
    ) -> Committed:
        """Accept a prefix of every block and add the bonus token; rank 0 decides for all.

        Args:
            logits: final, ``[bs * width, V]``; None where the greedy ``argmaxes`` are known.
        """
        sampling, draws, proposal = requests.sampling, requests.draws, block.proposal
        if logits is None:
            rows = Rows(argmaxes)
        else:
            kept = None
            if sampling.filters and not requests.all_greedy:
                by_block = logits.view(*block.tokens.shape, -1)
                kept = weights_of(by_block, sampling, self.renorm).flatten(0, 1)
            alone = proposal is None
            rows = read_rows(logits, kept, sampling, draws, block.positions, all_draw=alone)
        packed = verify_block(
            rows, block.tokens, block.positions, proposal, sampling, draws, self.vocabulary
        )
        if self.simulated > 0:
            self._simulate(unpack(packed, *block.tokens.shape), block, rows.tokens)
        site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        if requests.all_greedy:
            site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
        return unpack(self.runners.tp_sync.sync(site, packed), *block.tokens.shape)

    def _simulate(self, committed: Committed, block: Block, row_tokens: torch.Tensor) -> None:
        """Commit as many tokens as ``SGLANG_SIMULATE_ACC_LEN`` asks for, from 1 to the width.

        With real draft tokens, the bonus of an unseeded sampled request is 0.
        """
        apply_dflash_simulated_acceptance(
            candidates=block.tokens,
            target_predict=row_tokens.view(block.tokens.shape).clamp(max=self.vocabulary - 1),
            accept_len=torch.empty_like(committed.accept_lens),
            commit_lens=committed.accept_lens,
            bonus=committed.next_anchors,
            out_tokens=committed.tokens,
            simulate_acc_len=self.simulated,
            simulate_acc_method=envs.SGLANG_SIMULATE_ACC_METHOD.get(),
            simulate_acc_token_mode=envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(),
        )

    def draw_prefill(
        self,
        logits: torch.Tensor,
        probs: torch.Tensor,
        positions: torch.Tensor,
        requests: BatchRequests,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[bs]`` int64 of final ``logits [bs, V]``, and what they are drawn from.

        Args:
            probs: ``[bs, V]``, their softmax at the requests' temperatures.
            positions: ``[bs]``, of the last token of each prompt.
        """
        sampling, kept, weights = requests.sampling, None, probs
        if sampling.filters:
            # SGLang takes logprobs from the same storage.
            probs = probs.to(torch.float32, copy=True)
            kept = weights = filtered(probs.unsqueeze(1), sampling, self.renorm).squeeze(1)
        last = positions.long().unsqueeze(1)
        return read_rows(
            logits, kept, sampling, requests.draws, last, all_draw=True
        ).tokens, weights

    def add_logprobs(
        self, batch: Any, output: Any, committed: Committed, requests: BatchRequests
    ) -> None:
        """Sampling masks and logprobs of the committed tokens, where a request asked for them.

        A sampling mask holds what a token is drawn from. SGLang's own function
        (``build_speculative_verify_target_probs``) takes top-p of what top-k has left.
        """
        info, (_, width) = requests.info, committed.tokens.shape
        if info.sampling_mask_batch_indices is None and not batch.return_logprob:
            return
        tokens = committed.tokens.clamp(max=self.vocabulary - 1)  # a broken row's has no logit
        if info.sampling_mask_batch_indices is not None:
            probs = None
            if not requests.all_greedy:
                logits = output.next_token_logits
                by_block = logits.view(-1, width, logits.shape[-1])
                weights = weights_of(by_block, requests.sampling, self.renorm)
                probs = weights / weights.sum(-1, keepdim=True)
            output.sampling_mask_output = SpeculativeSamplingMaskCapture(
                target_probs=probs,
                batch_indices=info.sampling_mask_batch_indices,
                max_top_k=max(info.sampling_mask_top_ks),
                support_capture_indices=info.sampling_support_logprobs_capture_indices,
            ).build_output(out_tokens=tokens, commit_lens=committed.accept_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, tokens.flatten(), chain_stride=width)
