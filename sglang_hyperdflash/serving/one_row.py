"""Rounds without drafts: one target row a request, as a server without speculation would run it.

Drafting may go on in any later round, so the drafter's K/V of every token are still written: a slot
that was skipped would hold another request's. They are written for many passes at once
(``pending_kv``).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_hyperdflash.serving.exact import draw_rows, weights_of
from sglang_hyperdflash.serving.pending_kv import PENDING_ROWS, PendingRows
from sglang_hyperdflash.serving.rehearsal import RehearsedWorker
from sglang_hyperdflash.serving.rounds import sampling_of
from sglang_hyperdflash.serving.sampled_worker import BROKEN
from triton_ops.gumbel_op import gumbel_argmax


class OneRowWorker(RehearsedWorker):
    """A round of width 1, beside ``DFlashWorkerV2``'s own of a block."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        # There a node's slots are not a drafted block's alone: they travel to a decode node and
        # arrive there, are backed up when a request is retracted, or go to another's cache.
        linked = server_args.enable_unified_cache_external_linker
        shared = server_args.disaggregation_mode != "null" or linked
        self._pending = PendingRows(0 if shared else PENDING_ROWS)
        # The requests whose rows wait: a window's slots are known by the requests that have them.
        self._pending_of: Any = None
        # Whether the rows of a prefill that runs may wait.
        self._prefill_waits = False

    def write_pending(self) -> None:
        """Write the draft K/V of past passes; a drafted block and a later owner come after."""
        rows = self._pending.take()
        if rows is None:
            return
        hidden, slots, positions = rows
        self._pending_of = None
        lengths: dict[str, torch.Tensor] = {}
        if self.window is not None:  # which tells rounds from prefills by these
            ones = torch.ones_like(slots, dtype=torch.int32)
            lengths = {"cache_loc_2d": slots.unsqueeze(1), "commit_lens": ones}
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden, cache_loc=slots, positions=positions, **lengths
        )

    def _append_target_hidden_to_draft_kv_by_loc(
        self, *, target_hidden, cache_loc, positions, **rest
    ) -> None:
        """Seam: where ``DFlashWorkerV2`` writes draft K/V; those of some prefills wait.

        What waits is copied here, on the stream that will read it: slots are the scheduler's.
        """
        whole = len(target_hidden) >= len(cache_loc) == len(positions)  # else SGLang's own error
        if self._prefill_waits and whole and self._pending.fits(len(cache_loc)):
            hidden = target_hidden[: len(cache_loc)]  # behind them rows that pad the batch
            self._pending.add(hidden.clone(), cache_loc.clone(), positions.clone())
            return
        self.write_pending()
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden, cache_loc=cache_loc, positions=positions, **rest
        )

    def _keep_pending(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, shared: bool
    ) -> None:
        """Remember a round's rows. ``shared``: the next target pass overwrites ``hidden``."""
        pending = self._pending
        if not pending.fits(len(slots)):
            self.write_pending()
        last = not pending.fits(2 * len(slots))
        pending.add(hidden.clone() if shared and not last else hidden, slots, positions)
        self._pending_of = self.requests
        if last:
            self.write_pending()

    def one_row_round(
        self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """Verify the anchor of every request alone; seam: ``forward_batch_generation``'s contract.

        The worker's width is 1, ``_begin`` has read the batch.
        """
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        draft_input, bs = batch.spec_info, len(batch.seq_lens)
        prefix_lens = batch.seq_lens
        # A copy: rows wait, and the scheduler may write the lengths in place.
        positions = prefix_lens.to(torch.int64, copy=True)
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices, positions].long()
        anchors = draft_input.bonus_tokens.view(bs, 1)
        plan = self.target_worker.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=(
                batch.seq_lens_cpu
                if batch.seq_lens_cpu is not None
                else draft_input.nxt_kv_lens_cpu
            ),
            write_virtual=slots,
            read_extent=1,
        )
        tree = GrammarTree.from_linear_chain(anchors) if batch.has_grammar else None
        target_out = self._target_row(batch, anchors, positions, slots, plan)
        output = target_out.logits_output
        tokens = self._token_of_row(batch, output, anchors, tree, grammar_barrier)
        ones = torch.ones(bs, dtype=torch.int32, device=self.device)
        self._count(tokens.unsqueeze(1), ones)
        self._describe(batch, draft_input, output, tokens, ones)
        new_seq_lens = prefix_lens + 1
        if on_publish is not None:
            on_publish(new_seq_lens)
        shared = bool(target_out.can_run_cuda_graph)
        self._keep_pending(output.hidden_states, self._draft_write_ids(plan), positions, shared)
        output.hidden_states = None
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens,
            accept_lens=ones,
            can_run_cuda_graph=target_out.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=tokens, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=1,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target_out.routed_experts_output,
            indexer_topk_output=target_out.indexer_topk_output,
        )

    def _target_row(self, batch, anchors, positions, slots, plan):
        """The target's pass over ``anchors [bs, 1]``; the batch's host lengths are left alone."""
        verify = DFlashVerifyInput(
            draft_token=anchors.reshape(-1),
            positions=positions,
            draft_token_num=1,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan,
        )
        draft_input = batch.spec_info
        lengths, total = batch.seq_lens_cpu, batch.seq_lens_sum
        if lengths is not None:
            batch.seq_lens_cpu = lengths + 1
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        elif draft_input.nxt_kv_lens_cpu is not None:
            batch.seq_lens_cpu = draft_input.nxt_kv_lens_cpu
            batch.seq_lens_sum = int(draft_input.nxt_kv_lens_sum)
        batch.out_cache_loc = slots
        forward_batch, _ = verify.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths, total
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _token_of_row(self, batch, output, anchors, tree, grammar_barrier) -> torch.Tensor:
        """Each request's next token ``[bs]`` int64; broken rows give 0 and are remembered."""
        info, processor = batch.sampling_info, self._target_logits_processor
        if processor is not None and processor.is_deferred_shard(output.next_token_logits):
            if self._can_skip_verify_logits(batch, info):
                tokens = processor.deferred_argmax(output.next_token_logits).long()
                output.next_token_logits = None
                return self._settle(tokens, SpecTpSyncSite.DFLASH_ACCEPT_GREEDY)
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        logits = output.next_token_logits
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)
        self._adjust_block(logits, anchors)
        largest, tokens = logits.max(-1)
        broken = ~largest.isfinite()
        if not info.is_all_greedy:
            sampling, at = sampling_of(info), self._contexts - 1
            weights = weights_of(logits, sampling, self.renorm)
            tokens = draw_rows(logits, weights, sampling, self.requests.draws, at, gumbel_argmax)
        tokens = tokens.masked_fill(broken, BROKEN)
        return self._settle(tokens, SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE)

    def _describe(self, batch, draft_input, output, tokens, ones) -> None:
        """Sampling masks and logprobs of the round's ``tokens``, where a request asked for them."""
        capture = SpeculativeSamplingMaskCapture.from_logits(
            batch.sampling_info,
            next_token_logits=output.next_token_logits,
            draft_input=draft_input,
            draft_token_num=1,
            bs=len(tokens),
        )
        if capture is not None:
            output.sampling_mask_output = capture.build_output(
                out_tokens=tokens.unsqueeze(1), commit_lens=ones
            )
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, tokens, chain_stride=1)
