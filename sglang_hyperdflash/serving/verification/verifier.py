"""Verification: one target pass over every row of a block, the final logits, and what is accepted.

What changes the target's logits comes in the order of SGLang's baseline: penalties, grammar, bias,
custom processors. The grammar's mask is written first here: what is impossible stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.kernels.ops.speculative.dflash import compute_dflash_correct_drafts_and_bonus
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import _commit_accept
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils import is_cuda

from sglang_hyperdflash.serving.batch import BatchRequests, Block, RequestState
from sglang_hyperdflash.serving.verification.exact import (
    Verdict,
    draw_rows,
    filtered,
    verify_block,
    weights_of,
)
from triton_ops.gumbel_op import gumbel_argmax


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


@dataclass(frozen=True)
class Committed:
    """What a round commits.

    Attributes:
        tokens: ``[bs, width]`` int64: accepted drafts, then the bonus token; past the vocabulary
            where its row of logits is broken, which ends the request.
        accept_lens: ``[bs]`` int32, how many of them count: 1 + accepted drafts.
        next_anchors: ``[bs]`` int64: the bonus tokens, 0 where broken, since they are embedded.
        verdict: of sampled drafts, to learn the draft temperature from; None of a greedy round.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    next_anchors: torch.Tensor
    verdict: Verdict | None = None


class Verifier:
    """Verifies one round at a time.

    Args:
        worker: the ``DFlashWorkerV2`` whose target runs. request_state: has generated counts.
    """

    def __init__(self, worker: Any, request_state: RequestState) -> None:
        self.worker, self.request_state = worker, request_state
        self.renorm = renorm_kernels()
        self.vocabulary = int(worker.target_worker.model_runner.model_config.vocab_size)

    def forward(self, batch: Any, block: Block) -> Any:
        """The target's pass over the block; the batch's host lengths are left alone.

        Seam: the verify step of ``DFlashWorkerV2.forward_batch_generation``. With attention data
        parallelism an idle or prefilling rank runs eagerly, so all of them do.
        """
        worker, data_parallel = self.worker, get_parallel().attn_dp_enabled
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
            batch, worker.target_worker, defer_metadata_init=data_parallel
        )
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths
        if data_parallel:
            counts = forward_batch.original_global_num_tokens_cpu
            if batch.is_extend_in_batch or (counts is not None and min(counts) == 0):
                forward_batch.can_run_decode_cuda_graph = False
        return worker.target_worker.forward_batch_generation(
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
        processor = self.worker._target_logits_processor
        if processor is not None and processor.is_deferred_shard(output.next_token_logits):
            if requests.argmax_only and self.worker._can_skip_verify_logits(batch, requests.info):
                argmaxes = processor.deferred_argmax(output.next_token_logits).long()
                output.next_token_logits = None
                return argmaxes
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        logits = output.next_token_logits
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=requests.info,
                device=logits.device,
                barrier=barrier,
            )
            if mask is not None:
                mask.apply(logits)
        by_block = logits.view(*block.tokens.shape, -1)
        self.penalise(by_block, block.drafts, requests)
        if requests.info.logit_bias is not None:
            by_block.add_(requests.info.logit_bias.unsqueeze(1).to(logits.dtype))
        if requests.info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, requests.info)  # such batches have one row
        return None

    def penalise(self, logits: torch.Tensor, drafts: torch.Tensor, requests: BatchRequests) -> None:
        """Penalise ``logits [bs, B, V]`` that follow ``drafts [bs, B - 1]``, in place."""
        penalties = requests.penalties
        if penalties is not None:
            at, counts = penalties.rows, self.request_state.counts.table[penalties.slots]
            logits[at] = penalties.apply_to_block(logits[at], counts, drafts[at])
        if requests.end_tokens is not None:
            requests.end_tokens.forbid(logits, requests.contexts)

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
        sync, tokens = self.worker._tp_sync.sync, block.tokens
        site, verdict = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, None
        if block.proposal is None or requests.all_greedy:
            target = self._target_tokens(logits, block, requests) if argmaxes is None else argmaxes
            if requests.all_greedy:
                site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
            correct_drafts, bonus = compute_dflash_correct_drafts_and_bonus(
                candidates=tokens, target_predict=sync(site, target.view_as(tokens))
            )
        else:
            sampling, draws, at = requests.sampling, requests.block_draws, block.positions
            weights = weights_of(logits, sampling.repeated(block.width), self.renorm)
            verdict = verify_block(block.proposal, logits, weights, sampling, draws, at)
            correct_drafts = sync(site, verdict.correct_drafts)
            bonus = sync(site, verdict.bonus.masked_fill(verdict.broken, self.vocabulary))
        committed, accept_lens = _commit_accept(tokens, correct_drafts, bonus)
        next_anchors = bonus.masked_fill(bonus == self.vocabulary, 0)
        return Committed(committed, accept_lens, next_anchors, verdict)

    def _target_tokens(
        self, logits: torch.Tensor, block: Block, requests: BatchRequests
    ) -> torch.Tensor:
        """The target's token of every row, ``[bs * width]`` int64; past the vocabulary if broken.

        A batch with sampled requests comes here with one row of each.
        """
        largest, found = logits.max(-1)
        if not requests.all_greedy:
            weights = weights_of(logits, requests.sampling, self.renorm)
            at = block.positions[:, 0]
            found = draw_rows(logits, weights, requests.sampling, requests.draws, at)
        return found.masked_fill(~largest.isfinite(), self.vocabulary)

    def draw_prefill(
        self, probs: torch.Tensor, positions: torch.Tensor, requests: BatchRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[bs]`` int64 drawn from a softmax ``[bs, V]``, and its weights after filters."""
        sampling = requests.sampling
        # SGLang takes logprobs from the same storage.
        own = probs.clone() if sampling.filters and self.renorm is None else probs
        weights = filtered(own.float(), sampling, self.renorm)
        return gumbel_argmax(weights, requests.draws.seeds, positions.long()), weights

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
                each = requests.sampling.repeated(width)
                weights = weights_of(output.next_token_logits, each, self.renorm)
                probs = (weights / weights.sum(-1, keepdim=True)).view(-1, width, weights.shape[-1])
            output.sampling_mask_output = SpeculativeSamplingMaskCapture(
                target_probs=probs,
                batch_indices=info.sampling_mask_batch_indices,
                max_top_k=max(info.sampling_mask_top_ks),
                support_capture_indices=info.sampling_support_logprobs_capture_indices,
            ).build_output(out_tokens=tokens, commit_lens=committed.accept_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, tokens.flatten(), chain_stride=width)
