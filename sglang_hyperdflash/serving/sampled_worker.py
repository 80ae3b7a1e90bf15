"""The worker's part of sampling: drafts from q, both exact verifications, penalties in a block.

A round: :meth:`forward_batch_generation` reads the requests; the draft head's slot becomes
:func:`propose`; ``_accept_block`` adds what changes the target's logits, in the order of SGLang's
target-only path (penalties, grammar, bias, custom processors), and verifies. A prefill draws its
token from the same noise through the hooks of ``sampling_seams``.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.speculative.dflash_worker_v2 import (
    SIMULATE_ACC_LEN,
    _commit_accept,
    _DflashDraftSampler,
)
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.utils import is_cuda

from sglang_hyperdflash.draft.config import default_candidates
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Proposal, propose, propose_greedy
from sglang_hyperdflash.serving import sampling_seams
from sglang_hyperdflash.serving.draft_sampler import (
    CandidateSampler,
    candidates_of,
    check_candidates,
    supports_candidates,
)
from sglang_hyperdflash.serving.draft_temperature import DraftTemperature, read_draft_temperature
from sglang_hyperdflash.serving.exact import (
    Draws,
    Verdict,
    filtered,
    verify_block,
    weights_of,
)
from sglang_hyperdflash.serving.penalties import UNLIKELY, GeneratedCounts
from sglang_hyperdflash.serving.rounds import Requests, Seeds, gather, sampling_of
from sglang_hyperdflash.serving.window_worker import WindowedWorker
from triton_ops.gumbel_op import gumbel_argmax

logger = logging.getLogger(__name__)

# The token of a broken row inside a round: it equals no draft, so the block ends there.
BROKEN = -1


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


class SampledWorker(WindowedWorker):
    """Overrides of ``DFlashWorkerV2`` for everything between logits and tokens."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        runner = self.target_worker.model_runner
        self.dependency = self._usable_dependency(getattr(runner.model, "lm_head", None))
        vocabulary = int(runner.model_config.vocab_size)
        head = self.dependency and self.draft_model.hyperdflash_config.dependency
        self.num_candidates = head.top_k if head else default_candidates(vocabulary)
        check_candidates(self.num_candidates, getattr(runner.model, "lm_head", None))
        # Not the arguments' own: without --random-seed every node draws one for itself.
        self.seeds = Seeds(self.target_worker.random_seed)
        self.renorm = renorm_kernels()
        self.draft_temperature = DraftTemperature(self.device, fixed=read_draft_temperature())
        self.requests: Requests | None = None
        self._info: Any = None
        self._proposal: Proposal | None = None
        self._broken: torch.Tensor | None = None
        self._greedy: torch.Tensor | None = None
        self._counts: GeneratedCounts | None = None
        self._places: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        sampling_seams.serve(self)

    def _usable_dependency(self, lm_head: Any) -> torch.nn.Module | None:
        """The drafter's dependency head, None where the target gives it no candidates."""
        head = getattr(self.draft_model, "dependency", None)
        if head is not None and not supports_candidates(lm_head):
            logger.warning(
                "HYPERDFLASH: the dependency head is not used: SGLang reads no candidates "
                "from this target's LM head (%s). Answers stay exact; fewer drafts are accepted.",
                type(lm_head).__name__,
            )
            return None
        return head

    # A forward pass.

    def forward_batch_generation(self, batch, *args, **kwargs):
        """One round, or a prefill; seam: ``DFlashWorkerV2.forward_batch_generation``."""
        extend = batch.forward_mode.is_extend() or bool(batch.is_extend_in_batch)
        barrier = kwargs.get("grammar_barrier")
        if extend and batch.decoding_reqs and batch.has_grammar and barrier is not None:
            # A mixed batch draws the running requests' tokens under their grammars' masks.
            barrier()
        self._begin(batch, extend)
        result = self.run_round(batch, *args, **kwargs)
        if self._broken is not None:
            self._end_broken_requests(result)
        return result

    def run_round(self, batch, *args, **kwargs):
        """The round or prefill itself, its requests read."""
        return super().forward_batch_generation(batch, *args, **kwargs)

    def _begin(self, batch, extend: bool) -> None:
        self._proposal = self._broken = self._greedy = None
        self._info = batch.sampling_info
        reqs = batch.reqs
        slots = [self._slot(req) for req in reqs] if reqs else []
        if not reqs or self._info is None:
            self.requests = None
            return
        moved = [False] * len(reqs)
        if self.requests is None or extend or not self.requests.same(reqs, slots):
            self.requests = gather(reqs, slots, self.seeds, self.device)
            moved = self._moved(reqs, slots)
        # A decode row of a mixed batch goes on; every other row of a prefill starts.
        going_on = set(map(id, batch.decoding_reqs or ()))
        fresh = [extend and id(req) not in going_on for req in reqs]
        if self.requests.mine:
            self._start_counting([new or other for new, other in zip(fresh, moved, strict=True)])
        # Tokens of every context at its first row: the anchor of a round is not in seq_lens.
        self._contexts = batch.seq_lens if extend else batch.seq_lens + 1

    def _slot(self, req) -> int:
        """A request's row of the request pool.

        One whose last result was processed between its batch's making and its batch's pass
        (``sampling_seams.process_results_first``) has just left its row, which nobody has yet.
        """
        slot = req.kv.req_pool_idx
        return self._places[req][0] if slot is None else slot

    def _moved(self, reqs, slots: list[int]) -> list[bool]:
        """Which requests are new in their slots, or were retracted since they were seen there.

        A decode node resumes a retracted request without a prefill, maybe in the slot it had.
        """
        places = [(slot, req.retraction_count) for req, slot in zip(reqs, slots, strict=True)]
        moved = [self._places.get(req) != place for req, place in zip(reqs, places, strict=True)]
        self._places.update(zip(reqs, places, strict=True))
        return moved

    def _start_counting(self, stale: list[bool]) -> None:
        """Count what requests that start, or resume after a retraction, have generated."""
        for row, req in self.requests.mine:
            if stale[row]:
                self.counts.reset(self.requests.slots[row], req.output_ids)

    @property
    def counts(self) -> GeneratedCounts:
        """Tokens generated by requests with penalties."""
        if self._counts is None:
            runner = self.target_worker.model_runner
            slots = len(runner.req_to_token_pool.req_to_token)
            self._counts = GeneratedCounts(slots, runner.model_config.vocab_size, self.device)
        return self._counts

    def _end_broken_requests(self, result) -> None:
        """Put an id past the vocabulary where a token would come from a broken row.

        Seam: ``Req._check_vocab_boundary_finish`` ends the request there. The next round's anchor
        stays a token, since that round may already run.
        """
        past = int(self.target_worker.model_runner.model_config.vocab_size)
        if result.next_token_ids.numel() == len(self._broken):  # a prefill, or no drafts
            result.next_token_ids = result.next_token_ids.masked_fill(self._broken, past)
            return
        tokens = result.next_token_ids.view(len(self._broken), -1)
        at = (result.accept_lens.long() - 1).unsqueeze(1)
        last = tokens.gather(1, at).masked_fill(self._broken.unsqueeze(1), past)
        tokens.scatter_(1, at, last)

    # A prefill: one row a request, in SGLang's own sampler.

    def adjust_prefill(self, logits: torch.Tensor) -> None:
        """Penalties of a prefill's ``logits [bs, V]``, in place, before grammar and bias."""
        if self.requests is not None:
            self._penalise(logits.unsqueeze(1), self._no_drafts)

    def read_final_logits(self, logits: torch.Tensor) -> None:
        """Greedy tokens and broken rows of a prefill's final ``logits [bs, V]``."""
        largest, self._greedy = logits.max(-1)
        self._broken = ~largest.isfinite()

    def draw_prefill(
        self, probs: torch.Tensor, info: Any, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[bs]`` int64 of a batch with a sampled request, and what they are drawn from.

        Returns:
            The second is ``[bs, V]``, as :func:`weights_of`.
        """
        sampling = sampling_of(info)
        # SGLang takes logprobs from the same storage.
        own = probs.clone() if sampling.filters and self.renorm is None else probs
        weights = filtered(own.float(), sampling, self.renorm)
        drawn = gumbel_argmax(weights, self.requests.draws.seeds, positions.long())
        return torch.where(sampling.greedy, self._greedy, drawn), weights

    def target_distribution(self, logits: torch.Tensor, info: Any, rows: int) -> torch.Tensor:
        """What is drawn from, normalised: ``[bs, rows, V]`` fp32 of ``logits [bs * rows, V]``."""
        weights = weights_of(logits, sampling_of(info).repeated(rows), self.renorm)
        return (weights / weights.sum(-1, keepdim=True)).view(-1, rows, weights.shape[-1])

    def end_prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        """Count a prefill's ``tokens [bs]``; those of broken rows become 0."""
        if self._broken is not None:
            tokens = tokens.masked_fill(self._broken, 0)
        if self.requests is not None:
            self._count(tokens.long().unsqueeze(1), torch.ones_like(tokens))
        return tokens

    # A round: drafts.

    @property
    def batch_size(self) -> int:
        """Requests of this round."""
        return len(self.requests.reqs)

    def _maybe_build_draft_sampler(self):
        """Seam: SGLang's own head in the draft graph, when it builds one, becomes ours."""
        built = super()._maybe_build_draft_sampler()
        lm_head = getattr(self.target_worker.model_runner.model, "lm_head", None)
        if type(built) is not _DflashDraftSampler:
            return built
        if not supports_candidates(lm_head):
            return None  # eager: the argmaxes alone could not be verified as a distribution
        return CandidateSampler(self, lm_head, len(built.out) // (int(self.block_size) - 1))

    def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states, lm_head, **rest):
        """Seam: where ``DFlashWorkerV2`` turns draft rows ``[bs * (B-1), d]`` into tokens."""
        greedy = self.requests is None or self.requests.greedy
        if self.requests is None or (greedy and self.dependency is None):
            return super()._greedy_sample_from_vocab_parallel_head(
                hidden_states=hidden_states, lm_head=lm_head, **rest
            )
        if supports_candidates(lm_head):
            drafts, k = int(self.block_size) - 1, self.num_candidates
            found = candidates_of(hidden_states, drafts, lm_head, k, self.dependency)
            if greedy:
                anchor = self._draft_block_ids_buf[: self.batch_size, 0]
                return self.agree(propose_greedy(found, anchor, self.dependency)).reshape(-1)
            return self.draw_drafts(found)
        # A head that SGLang reads argmaxes from, no more: drafts are point masses.
        ids = (
            super()
            ._greedy_sample_from_vocab_parallel_head(
                hidden_states=hidden_states, lm_head=lm_head, **rest
            )
            .view(self.batch_size, -1, 1)
        )
        return self.draw_drafts(Candidates(ids, torch.zeros_like(ids, dtype=torch.float32)))

    def draw_drafts(self, candidates: Candidates) -> torch.Tensor:
        """Drafts ``[bs * (B-1)]`` int64 of candidates; verification needs their distribution."""
        requests, drafts = self.requests, int(self.block_size) - 1
        first = self._contexts - 1
        self._proposal = propose(
            candidates,
            self._draft_block_ids_buf[: self.batch_size, 0],
            self.dependency,
            sampling_of(self._info),
            requests.draws.of_block(first).seeds,
            first.unsqueeze(1) + self._block_pos_offsets[:drafts],
            self.draft_temperature.of(requests.draws.seeded),
            self._adjust_candidates if self._changes_drafts() else None,
        )
        return self.agree(self._proposal.tokens).reshape(-1)

    def agree(self, drafts: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``drafts`` on every rank, in place: all must verify the same block.

        Each rank sums for itself what a dependency head reads of a row, and the temperature.
        Seam: ``SpecTpSync``, as DSPARK's drafts.
        """
        return self._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, drafts)

    def _changes_drafts(self) -> bool:
        requests = self.requests
        changed = requests.penalties is not None or requests.ends is not None
        return changed or self._info.logit_bias is not None

    def _adjust_candidates(
        self, k: int, ids: torch.Tensor, scores: torch.Tensor, so_far: torch.Tensor
    ) -> torch.Tensor:
        """Penalties, end tokens and bias at draft k's candidates ``[bs, K]``."""
        penalties, ends = self.requests.penalties, self.requests.ends
        if penalties is not None:
            rows = penalties.rows
            own, drafted = ids[rows], so_far[rows]
            counts = self.counts.table[penalties.slots.unsqueeze(1), own]
            counts = counts + (own.unsqueeze(2) == drafted.unsqueeze(1)).sum(-1)
            scores = scores.index_copy(0, rows, penalties.applied(scores[rows], counts))
        if ends is not None:
            early = ends.too_early(self._contexts, k + 1)[:, -1]
            is_end = (ids[ends.rows].unsqueeze(2) == ends.ids.unsqueeze(1)).any(-1)
            forbidden = is_end & early.unsqueeze(1)
            allowed = scores[ends.rows].masked_fill(forbidden, UNLIKELY)
            scores = scores.index_copy(0, ends.rows, allowed)
        if self._info.logit_bias is not None:
            scores = scores + self._info.logit_bias.gather(1, ids).float()
        return scores

    # A round: verification.

    def _can_skip_verify_logits(self, batch, sampling_info) -> bool:
        """Seam: SGLang does not know of our penalties."""
        if self.requests is None or not self.requests.greedy:
            return False
        return super()._can_skip_verify_logits(batch, sampling_info)

    def _accept_block(
        self,
        *,
        candidates: torch.Tensor,
        next_token_logits: torch.Tensor | None,
        sampling_info,
        draft_input,
        prefix_lens: torch.Tensor,
        bs: int,
        target_predict: torch.Tensor | None = None,
    ):
        """Accept a prefix of each chain; seam: ``DFlashWorkerV2._accept_block``."""
        logits = next_token_logits
        if target_predict is None:
            self._adjust_block(logits, candidates)
        if self._proposal is None or sampling_info.is_all_greedy or SIMULATE_ACC_LEN > 0:
            if target_predict is None:
                largest, target_predict = logits.max(-1)
                target_predict = target_predict.masked_fill(~largest.isfinite(), BROKEN)
            accept_len, commit_lens, bonus, tokens, new_seq_lens = super()._accept_block(
                candidates=candidates,
                next_token_logits=logits,
                sampling_info=sampling_info,
                draft_input=draft_input,
                prefix_lens=prefix_lens,
                bs=bs,
                target_predict=target_predict,
            )
            # Rank 0's by now: all ranks end the same requests.
            broken = target_predict.view(bs, -1) == BROKEN
            self._broken = broken.gather(1, accept_len.long().unsqueeze(1)).squeeze(1)
            bonus.clamp_(min=0)
            tokens.clamp_(min=0)
        else:
            sampling = sampling_of(sampling_info)
            requests = self.requests
            verdict = self._verify(logits, sampling, self._proposal, requests.draws)
            accept_len = verdict.accept_len
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, accept_len)
            bonus = verdict.bonus.masked_fill(verdict.broken, BROKEN)
            bonus = self._settle(bonus, SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE)
            tokens, commit_lens = _commit_accept(candidates, accept_len, bonus)
            new_seq_lens = None
        self._count(tokens, commit_lens)
        return accept_len, commit_lens, bonus, tokens, new_seq_lens

    def _settle(self, tokens: torch.Tensor, site: SpecTpSyncSite) -> torch.Tensor:
        """Rank 0's ``tokens [bs]``, in place: all ranks end the same requests, and go on from 0.

        Args:
            tokens: the last of each request's round; ``BROKEN`` at a broken row.
        """
        self._tp_sync.sync(site, tokens)
        self._broken = tokens == BROKEN
        return tokens.clamp_(min=0)

    def _verify(
        self,
        logits: torch.Tensor,
        sampling: Sampling,
        proposal: Proposal,
        draws: Draws,
    ) -> Verdict:
        block = int(self.block_size)
        positions = (self._contexts - 1).unsqueeze(1) + self._block_pos_offsets
        draws = draws.of_block(positions[:, 0])
        weights = weights_of(logits, sampling.repeated(block), self.renorm)
        verdict = verify_block(proposal, logits, weights, sampling, draws, positions, gumbel_argmax)
        self.draft_temperature.learn(proposal, sampling, draws.seeded, verdict)
        return verdict

    def _adjust_block(self, logits: torch.Tensor, candidates: torch.Tensor) -> None:
        """All that changes the target's ``logits [bs * B, V]`` but the grammar's mask, in place.

        The mask is in them already; impossible tokens stay so under what is added here.
        """
        bs, block = candidates.shape
        rows = logits.view(bs, block, -1)
        self._penalise(rows, candidates[:, 1:])
        if self._info.logit_bias is not None:
            rows.add_(self._info.logit_bias.unsqueeze(1).to(logits.dtype))
        if self._info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, self._info)  # only ever at width 1

    # What both share.

    @property
    def _no_drafts(self) -> torch.Tensor:
        return torch.empty(len(self.requests.reqs), 0, dtype=torch.int64, device=self.device)

    def _penalise(self, rows: torch.Tensor, drafts: torch.Tensor) -> None:
        """Penalties and end tokens of ``rows [bs, B, V]`` that follow ``drafts``, in place."""
        penalties, ends = self.requests.penalties, self.requests.ends
        if penalties is not None:
            chosen = penalties.rows
            counts = self.counts.table[penalties.slots]
            rows[chosen] = penalties.apply_to_block(rows[chosen], counts, drafts[chosen])
        if ends is not None:
            ends.forbid(rows, self._contexts)

    def _count(self, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """The first ``lengths [bs]`` of ``tokens [bs, B]`` were generated."""
        requests = self.requests
        if requests is None:
            return
        if requests.penalties is not None:
            rows = requests.penalties.rows
            self.counts.add(requests.penalties.slots, tokens[rows], lengths[rows])
