"""A target whose next token depends on the last one alone, decoded by rounds of drafts."""

import itertools
from types import SimpleNamespace

import torch

from sglang_hyperdflash.draft.adjust import adjust_rows
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import NO_ADJUSTMENTS, Candidates, Draws, propose
from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.verification.exact import Committed, weights_of
from sglang_hyperdflash.serving.verification.verifier import Verifier
from tests.unit.statistics_help import chi_square_p_value
from triton_ops.gumbel import gumbel_argmax

VOCAB, WIDTH, DRAFTS = 12, 8, 3
WHOLE = (DRAFTS + 1,)  # the widths of rounds of whole blocks
START, FIRST_POSITION = 0, 40


class Markov:
    """Logits ``table [V, V]`` after each token, and a drafter that is often wrong.

    Drafts of a ``linked`` one know the draft before them, through a dependency head.
    """

    def __init__(self, seed: int, sure=1.5, agreement=1.0, linked=False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator) * sure
        noise = torch.randn(VOCAB, DRAFTS, VOCAB, generator=generator) * 1.5
        self.drafter = agreement * self.table.unsqueeze(1) + (1 - agreement / 2) * noise
        head = SimpleNamespace(predecessor=0.5 * self.table, successor=torch.eye(VOCAB))
        self.head = head if linked else None

    def candidates(self, anchor: torch.Tensor, drafts: int = DRAFTS) -> Candidates:
        scores, ids = self.drafter[anchor, :drafts].topk(WIDTH, dim=-1)
        return Candidates(ids, scores, torch.ones(*ids.shape[:2], VOCAB))

    def decode(self, sampling, seeds, seeded, tokens: int, t=1.0, widths=WHOLE, penalties=None):
        """``[N, tokens]`` of N requests with one context, and the mean accepted drafts of a round.

        Args:
            sampling: of one request, or of each. t: the draft temperature.
            widths: of the rounds in turn, again and again. penalties: what counts the tokens of N
                requests with penalties, and these.
        """
        count = len(seeds)
        sampling = sampling.repeated(count // len(sampling.top_ks))
        draws = Draws(seeds, torch.full((count,), seeded), not seeded)
        out = torch.full((count, tokens + DRAFTS + 1), -1)
        out[:, 0] = START
        length = torch.ones(count, dtype=torch.long)  # with the context's token
        accepted = rounds = 0.0
        for width in itertools.cycle(widths):
            if int(length.min()) > tokens:
                return out[:, 1 : tokens + 1], accepted / rounds
            proposal = None
            block = out.gather(1, (length - 1).unsqueeze(1))
            positions = FIRST_POSITION + (length - 1).unsqueeze(1) + torch.arange(width)
            changes = penalties and penalties[1].changes()
            if width > 1:
                candidates = self.candidates(block[:, 0], width - 1)
                drafting = self.head, block, positions, sampling, draws, t
                proposal = propose(candidates, *drafting, changes or NO_ADJUSTMENTS)
                block = torch.cat([block, proposal.tokens], 1)
            logits = self.table[block]
            if changes is not None:
                adjust_rows(logits, block, positions, *changes.tensors)
            committed = verified(logits, block, positions, proposal, sampling, draws)
            # Requests that are done stay as they are.
            emitted = committed.accept_lens.long().masked_fill(length > tokens, 0)
            for k in range(width):
                write = (k < emitted) & (length + k < out.shape[1])
                out[write, (length + k)[write]] = committed.tokens[write, k]
            if penalties is not None:
                state, requests = penalties
                state.count(requests, committed.tokens, emitted)
            accepted += float((emitted - 1).clamp(min=0).sum())
            rounds += float((emitted > 0).sum())
            length += emitted

    def blocks(self, seeded: torch.Tensor) -> tuple:
        """A round of equal requests, some of them ``seeded [N]``: what :func:`verified` takes."""
        count, draws = len(seeded), Draws(torch.arange(len(seeded)) * 7919 + 13, seeded)
        anchor, positions = torch.zeros(count, 1).long(), torch.arange(DRAFTS + 1).repeat(count, 1)
        sampling, candidates = one().repeated(count), self.candidates(anchor.squeeze(1))
        proposal = propose(candidates, self.head, anchor, positions, sampling, draws, 1.0)
        block = torch.cat([anchor, proposal.tokens], 1)
        return self.table[block], block, positions, proposal, sampling, draws

    def weights(self, sampling: Sampling, before: torch.Tensor, change) -> torch.Tensor:
        """What N requests that have generated ``before [N, n]`` sample from, ``[N, V]``.

        ``change`` makes other logits of the target's and of what was generated.
        """
        logits = self.table[before[:, -1]] if before.shape[1] else self.table[[START] * len(before)]
        if change is not None:
            logits = change(logits, before)
        sampling = sampling.repeated(len(before) // len(sampling.top_ks))
        return weights_of(logits.unsqueeze(1), sampling).squeeze(1)

    def alone(self, sampling: Sampling, seeds, tokens: int, change=None) -> torch.Tensor:
        """``[N, tokens]`` of target-only decoding with the same noise: one token a step."""
        made = seeds.new_empty(len(seeds), 0)
        for step in range(tokens):
            weights = self.weights(sampling, made, change)
            drawn = gumbel_argmax(weights, seeds, torch.full_like(seeds, FIRST_POSITION + step))
            token = torch.where(sampling.greedy, weights.argmax(-1), drawn)
            made = torch.cat([made, token.unsqueeze(1)], 1)
        return made

    def p_values(self, tokens: torch.Tensor, sampling: Sampling, change=None) -> list[float]:
        """The laws of the first token, of the first two and of the second two."""
        every = torch.arange(VOCAB)

        def law(before: torch.Tensor) -> torch.Tensor:
            weights = self.weights(sampling, before, change)
            return weights / weights.sum(-1, keepdim=True)

        first = law(every.new_empty(1, 0))[0]
        pair = (first.unsqueeze(1) * law(every.unsqueeze(1))).flatten()
        third = law(torch.cartesian_prod(every, every))
        second = (pair.unsqueeze(1) * third).view(VOCAB, VOCAB, VOCAB).sum(0)
        return [
            chi_square_p_value(tokens[:, 0], first),
            chi_square_p_value(tokens[:, 0] * VOCAB + tokens[:, 1], pair),
            chi_square_p_value(tokens[:, 1] * VOCAB + tokens[:, 2], second.flatten()),
        ]


def verifier_of(vocabulary: int) -> Verifier:
    made = object.__new__(Verifier)
    made.vocabulary, made.renorm = vocabulary, None
    made.runners = SimpleNamespace(tp_sync=SimpleNamespace(sync=lambda site, packed: packed))
    return made


def verified(logits, block, positions, proposal, sampling, draws) -> Committed:
    """What :meth:`Verifier.accept` makes of final ``logits [N, width, V]``."""
    given = {"sampling": sampling, "draws": draws, "all_greedy": bool(sampling.greedy.all())}
    block = Block(block, positions, None, None, proposal)
    verifier = verifier_of(logits.shape[-1])
    return verifier.accept(logits.flatten(0, 1), None, block, SimpleNamespace(**given))


def one(**values: float) -> Sampling:
    off = {"temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0}
    filters = (name in values for name in ("top_k", "top_p", "min_p"))
    return Sampling(*(torch.tensor([value]) for value in (off | values).values()), *filters)
