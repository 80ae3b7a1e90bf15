"""Drafting: one pass of the drafter over every request's block, then its tokens.

Greedy requests take the likeliest token of each row; where anyone samples, drafts are drawn from a
distribution q, which verification needs (``draft/propose.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_hyperdflash.draft.propose import (
    NO_ADJUSTMENTS,
    Candidates,
    Proposal,
    propose,
    propose_greedy,
)
from sglang_hyperdflash.serving.batch import BatchRequests, Block
from sglang_hyperdflash.serving.draft_kv.draft_kv import DraftContext
from sglang_hyperdflash.serving.drafting.candidates import (
    CandidateBuffers,
    candidates_of,
    check_head,
)
from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.serving.width.lanes import Lane
from triton_ops.copies import Copies


class DraftStep:
    """Drafts of one round at a time.

    Args:
        draft_temperature: ``t`` of ``draft/propose.py``.

    Attributes:
        lm_head: the target's.
        head: the dependency head, or None.
        candidates: K of each draft.
        copies: of the batch that runs; None without copies.
    """

    copies: Copies | None = None

    def __init__(self, runners: Runners, draft_temperature: float) -> None:
        self.runners, self.draft_temperature = runners, draft_temperature
        self.lm_head = getattr(runners.target.model, "lm_head", None)
        self.head = runners.draft_model.dependency
        self.candidates = runners.draft_model.hyperdflash_config.candidates
        check_head(self.lm_head, self.candidates)

    def buffers(self, width: int, most: int) -> CandidateBuffers:
        """Buffers for the draft graphs of one width, of ``most`` requests."""
        sizes, device = (width, self.candidates), self.runners.device
        return CandidateBuffers(*sizes, self.lm_head, self.head, most, device, self.copies)

    def draft(
        self, batch: Any, block: Block, context: DraftContext, requests: BatchRequests, lane: Lane
    ) -> Block:
        """The block with its drafts, one pass of the drafter later."""
        out, bs, proposal = self._forward(batch, block, context, lane), len(block.tokens), None
        captured = lane.draft_buffers if out.can_run_graph else None
        if captured is not None:
            candidates = captured.of(bs)
        else:
            hidden = out.logits_output.hidden_states.view(bs, block.width, -1)[:, 1:]
            with draft_tp_context(self.runners.draft_layout):
                candidates = candidates_of(hidden, self.lm_head, self.candidates, self.head)
        if not requests.argmax_only:
            proposal = self._draw(candidates, block, requests)
            drafts = proposal.tokens
        elif captured is not None:
            drafts = captured.greedy[:bs]
        else:
            drafts = propose_greedy(candidates, block.anchors, self.head, self.copies)
        if not requests.argmax_only or self.head is not None:
            # Each rank sums for itself what a dependency head reads of a row: rank 0's drafts go to
            # all, in place. Seam: ``SpecTpSync``, as DSPARK's drafts.
            self.runners.tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, drafts)
        return block.drafted(drafts, proposal)

    def _forward(self, batch: Any, block: Block, context: DraftContext, lane: Lane) -> Any:
        """The draft pass; seam: the ``ForwardBatch`` of ``DFlashWorkerV2``'s draft step."""
        runners, rows = self.runners, block.tokens.numel()
        padded = None
        if enable_num_token_non_padded():
            padded = torch.full((), rows, dtype=torch.int32, device=runners.device)
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
        context.plan.bind(forward_batch, runners.draft.kv_index_translator)
        with torch.inference_mode(), draft_tp_context(runners.draft_layout):
            return runners.draft.forward(forward_batch)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[bs * width, d]``: the target's embeddings, as ``DFlashWorkerV2`` looks them up."""
        whole = self.runners.full_embedding
        if whole is not None:  # attention data parallelism: no collective here
            embedded = torch.nn.functional.embedding(ids, whole)
        else:
            embedded = self.runners.target.model.get_input_embeddings()(ids)
        return embedded.view(-1, embedded.shape[-1])

    def _draw(self, candidates: Candidates, block: Block, requests: BatchRequests) -> Proposal:
        """Draw a block's drafts, with the noise of the requests' seeds."""
        return propose(
            candidates,
            self.head,
            block.tokens,
            block.positions,
            requests.sampling,
            requests.draws,
            self.draft_temperature,
            requests.changes() or NO_ADJUSTMENTS,
            self.copies,
        )
