"""Drafting: one pass of the drafter over every request's block, then its tokens.

Greedy requests take the likeliest token of each row; where anyone samples, drafts are drawn from a
distribution q, which verification needs (``draft/propose.py``).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_hyperdflash.draft.config import default_candidates
from sglang_hyperdflash.draft.propose import Candidates, Proposal, propose, propose_greedy
from sglang_hyperdflash.serving.draft_kv.draft_kv import DraftContext
from sglang_hyperdflash.serving.drafting.block import Block
from sglang_hyperdflash.serving.drafting.candidates import (
    CandidateBuffers,
    candidates_of,
    check_candidates,
    supports_candidates,
)
from sglang_hyperdflash.serving.drafting.temperature import (
    DraftTemperature,
    read_draft_temperature,
)
from sglang_hyperdflash.serving.requests import BatchRequests, RequestState
from sglang_hyperdflash.serving.verification.exact import Verdict
from sglang_hyperdflash.serving.verification.penalties import UNLIKELY
from sglang_hyperdflash.serving.width.lanes import Lane

logger = logging.getLogger(__name__)


class Drafter:
    """Drafts of one round at a time.

    Args:
        worker: the ``DFlashWorkerV2`` whose draft runner and embeddings are used.
        request_state: has generated counts, for penalties.
    """

    def __init__(self, worker: Any, request_state: RequestState) -> None:
        self.worker, self.request_state = worker, request_state
        target = worker.target_worker.model_runner
        self.lm_head = unwrap_lora_layer(getattr(target.model, "lm_head", None))
        self.head = self._usable_head()
        configured = self.head and worker.draft_model.hyperdflash_config.dependency
        vocabulary = int(target.model_config.vocab_size)
        self.candidates = configured.top_k if configured else default_candidates(vocabulary)
        check_candidates(self.candidates, self.lm_head)
        self.draft_temperature = DraftTemperature(worker.device, fixed=read_draft_temperature())

    def _usable_head(self) -> torch.nn.Module | None:
        """The drafter's dependency head, None where the target gives it no candidates."""
        head = getattr(self.worker.draft_model, "dependency", None)
        if head is not None and not supports_candidates(self.lm_head):
            logger.warning(
                "HYPERDFLASH: the dependency head is not used: SGLang reads no candidates "
                "from this target's LM head (%s). Answers stay exact; fewer drafts are accepted.",
                type(self.lm_head).__name__,
            )
            return None
        return head

    def buffers(self, width: int, most: int) -> CandidateBuffers | None:
        """Buffers for the draft graphs of one width; None where the head cannot be captured."""
        if not supports_candidates(self.lm_head):
            return None  # argmaxes alone could not be verified as a distribution
        device = self.worker.device
        return CandidateBuffers(width, self.candidates, self.lm_head, self.head, most, device)

    def draft(
        self, batch: Any, block: Block, context: DraftContext, requests: BatchRequests, lane: Lane
    ) -> Block:
        """The block with its drafts, one pass of the drafter later."""
        out = self._forward(batch, block, context, lane)
        bs = len(block.tokens)
        captured = lane.candidates if out.can_run_graph else None
        hidden = None
        if captured is None:
            hidden = out.logits_output.hidden_states.view(bs, block.width, -1)[:, 1:]
        if not requests.greedy:
            found = captured.of(bs) if captured is not None else self._eager_candidates(hidden)
            proposal = self._draw(found, block, requests)
            return block.drafted(self._agree(proposal.tokens), proposal)
        if captured is not None:
            drafts = captured.greedy[:bs]
        elif self.head is not None:
            drafts = propose_greedy(self._eager_candidates(hidden), block.anchors, self.head)
        else:
            drafts = self._argmax(hidden)
        # Without a head these are argmaxes gathered over ranks: the same on all.
        return block.drafted(drafts if self.head is None else self._agree(drafts), None)

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
            seq_lens_sum=context.ends_sum,
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
            module = _resolve_dflash_embedding_module(worker.draft_model, target)
            found = unwrap_lora_layer(module)(ids)
        if worker._noise_embed_scale != 1.0:
            found = found * worker._noise_embed_scale
        return found.view(-1, found.shape[-1])

    def _eager_candidates(self, hidden: torch.Tensor) -> Candidates:
        """Candidates of hidden rows ``[bs, D, d]`` where no graph has them."""
        if supports_candidates(self.lm_head):
            with draft_tp_context(self.worker.draft_parallel_layout):
                return candidates_of(hidden, self.lm_head, self.candidates, self.head)
        # A head that SGLang reads argmaxes from, no more: one candidate a draft.
        ids = self._argmax(hidden).unsqueeze(-1)
        return Candidates(ids, torch.zeros_like(ids, dtype=torch.float32))

    def _argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each hidden row ``[bs, D, d]``: ``[bs, D]`` int64.

        Seam: ``DFlashWorkerV2._greedy_sample_from_vocab_parallel_head``.
        """
        with draft_tp_context(self.worker.draft_parallel_layout):
            return self.worker._greedy_sample_from_vocab_parallel_head(
                hidden_states=hidden.reshape(-1, hidden.shape[-1]), lm_head=self.lm_head
            ).view(hidden.shape[:2])

    def _draw(self, candidates: Candidates, block: Block, requests: BatchRequests) -> Proposal:
        """Draw a block's drafts, with the noise of the requests' seeds."""
        before = block.positions[:, :-1]
        return propose(
            candidates,
            block.anchors,
            self.head,
            requests.sampling,
            requests.draws.of_block(before[:, 0]).seeds,
            before,
            self.draft_temperature.of(requests.draws.seeded),
            self._adjust_for(requests) if requests.changes_logits else None,
        )

    def _agree(self, drafts: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``drafts`` on every rank, in place: all must verify the same block.

        Each rank sums for itself what a dependency head reads of a row, and the temperature.
        Seam: ``SpecTpSync``, as DSPARK's drafts.
        """
        return self.worker._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, drafts)

    def _adjust_for(self, requests: BatchRequests) -> Any:
        """Penalties, end tokens and bias at draft k's candidates: an ``Adjust`` of ``propose``."""
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
