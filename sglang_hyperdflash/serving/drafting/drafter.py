"""Drafting: one pass of the drafter over every request's block, then its tokens.

Greedy requests take the likeliest token of each row; where anyone samples, drafts are drawn from a
distribution q, which verification needs (``draft/propose.py``), at the learnt or given draft
temperature (``temperature.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_hyperdflash.draft.propose import Adjust, Candidates, Proposal, propose, propose_greedy
from sglang_hyperdflash.serving.batch import BatchRequests, Block, RequestState
from sglang_hyperdflash.serving.draft_kv.draft_kv import DraftContext
from sglang_hyperdflash.serving.drafting.candidates import (
    CandidateBuffers,
    candidates_of,
    check_head,
)
from sglang_hyperdflash.serving.drafting.temperature import (
    DraftTemperature,
    read_draft_temperature,
)
from sglang_hyperdflash.serving.verification.exact import Verdict
from sglang_hyperdflash.serving.verification.penalties import UNLIKELY
from sglang_hyperdflash.serving.width.lanes import Lane


class Drafter:
    """Drafts of one round at a time.

    Args:
        worker: the ``DFlashWorkerV2`` whose draft runner and embeddings are used.
        request_state: has generated counts, for penalties.
    """

    def __init__(self, worker: Any, request_state: RequestState) -> None:
        self.worker, self.request_state = worker, request_state
        target = worker.target_worker.model_runner.model
        self.lm_head = unwrap_lora_layer(getattr(target, "lm_head", None))
        self.head = worker.draft_model.dependency  # or None
        self.candidates = worker.draft_model.hyperdflash_config.candidates
        check_head(self.lm_head, self.candidates)
        self.draft_temperature = DraftTemperature(worker.device, fixed=read_draft_temperature())

    def buffers(self, width: int, most: int) -> CandidateBuffers:
        """Buffers for the draft graphs of one width, of ``most`` requests."""
        device = self.worker.device
        return CandidateBuffers(width, self.candidates, self.lm_head, self.head, most, device)

    def draft(
        self, batch: Any, block: Block, context: DraftContext, requests: BatchRequests, lane: Lane
    ) -> Block:
        """The block with its drafts, one pass of the drafter later."""
        out, bs, proposal = self._forward(batch, block, context, lane), len(block.tokens), None
        captured = lane.candidates if out.can_run_graph else None
        if captured is not None:
            found = captured.of(bs)
        else:
            hidden = out.logits_output.hidden_states.view(bs, block.width, -1)[:, 1:]
            with draft_tp_context(self.worker.draft_parallel_layout):
                found = candidates_of(hidden, self.lm_head, self.candidates, self.head)
        if not requests.argmax_only:
            proposal = self._draw(found, block, requests)
            drafts = proposal.tokens
        elif captured is not None:
            drafts = captured.greedy[:bs]
        else:
            drafts = propose_greedy(found, block.anchors, self.head)
        if not requests.argmax_only or self.head is not None:
            # Each rank sums for itself what a dependency head reads of a row, and the temperature:
            # rank 0's drafts go to all, in place. Seam: ``SpecTpSync``, as DSPARK's drafts.
            self.worker._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, drafts)
        return block.drafted(drafts, proposal)

    def learn(self, block: Block, requests: BatchRequests, verdict: Verdict | None) -> None:
        """Learn the draft temperature from how sampled drafts fared; None of a greedy round."""
        if verdict is not None:
            seeded = requests.draws.seeded
            self.draft_temperature.learn(block.proposal, requests.sampling, seeded, verdict)

    def _forward(self, batch: Any, block: Block, context: DraftContext, lane: Lane) -> Any:
        """The draft pass; seam: the ``ForwardBatch`` of ``DFlashWorkerV2``'s draft step."""
        worker, rows = self.worker, block.tokens.numel()
        padded = None
        if enable_num_token_non_padded():
            padded = torch.full((), rows, dtype=torch.int32, device=worker.device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(block.tokens),
            input_ids=block.tokens.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=context.lengths,
            out_cache_loc=block.slots,
            seq_lens_sum=int(context.ends_cpu.sum()),
            seq_lens_cpu=context.ends_cpu,
            positions=block.positions.flatten(),
            input_embeds=self._embed(block.tokens),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=lane.spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=padded,
            global_num_token_non_padded_cpu=rows,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        context.plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator)
        with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
            return worker.draft_model_runner.forward(forward_batch)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[bs * width, d]``: the target's embeddings, as ``DFlashWorkerV2`` looks them up."""
        worker = self.worker
        if worker._full_embed_gpu is not None:  # attention data parallelism: no collective here
            found = torch.nn.functional.embedding(ids, worker._full_embed_gpu)
        else:
            target = worker.target_worker.model_runner.model
            found = unwrap_lora_layer(target.get_input_embeddings())(ids)
        return found.view(-1, found.shape[-1])

    def _draw(self, candidates: Candidates, block: Block, requests: BatchRequests) -> Proposal:
        """Draw a block's drafts, with the noise of the requests' seeds."""
        before = block.positions[:, :-1]
        return propose(
            candidates,
            block.anchors,
            self.head,
            requests.sampling,
            requests.block_draws.seeds,
            before,
            self.draft_temperature.of(requests.draws.seeded),
            self._adjust_for(requests) if requests.changes_logits else None,
        )

    def _adjust_for(self, requests: BatchRequests) -> Adjust:
        """Penalties, end tokens and bias at draft k's candidates."""
        penalties, ends, bias = requests.penalties, requests.end_tokens, requests.info.logit_bias

        def adjust(
            k: int, ids: torch.Tensor, scores: torch.Tensor, so_far: torch.Tensor
        ) -> torch.Tensor:
            if penalties is not None:
                at = penalties.rows
                chosen, drafted = ids[at], so_far[at]
                counts = self.request_state.counts.table[penalties.slots.unsqueeze(1), chosen]
                counts = counts + (chosen.unsqueeze(2) == drafted.unsqueeze(1)).sum(-1)
                scores = scores.index_copy(0, at, penalties.applied(scores[at], counts))
            if ends is not None:
                early = ends.too_early(requests.contexts, k + 1)[:, -1]
                is_end = (ids[ends.rows].unsqueeze(2) == ends.ids.unsqueeze(1)).any(-1)
                forbidden = is_end & early.unsqueeze(1)
                found = scores[ends.rows].masked_fill(forbidden, UNLIKELY)
                scores = scores.index_copy(0, ends.rows, found)
            if bias is not None:
                scores = scores + bias.gather(1, ids).float()
            return scores

        return adjust
