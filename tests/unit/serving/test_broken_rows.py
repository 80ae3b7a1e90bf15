"""A broken row ends its block and its request; the next round's anchor stays a token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Draws
from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.verification import verifier as module
from sglang_hyperdflash.serving.verification.verifier import Verifier

VOCABULARY = 8
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def verifier():
    made = object.__new__(Verifier)
    made.vocabulary, made.renorm = VOCABULARY, None
    made.worker = SimpleNamespace(_tp_sync=SimpleNamespace(sync=lambda site, tokens: tokens))
    return made


def accepted(verifier, tokens, logits, sampled: bool = False):
    """Emitted tokens and next anchors; greedy, or at a low temperature and half of it seeded."""
    count, ones = len(tokens), torch.ones(len(tokens))
    top_ks = torch.full((count,), 1 << 30 if sampled else 1)
    sampling = Sampling(0.01 * ones if sampled else ones, top_ks, ones, 0 * ones)
    draws = Draws(torch.arange(count), torch.arange(count) % 2 == 0)
    requests = SimpleNamespace(all_greedy=not sampled, sampling=sampling, draws=draws)
    found, _ = verifier.accept(logits, None, Block(tokens, tokens, None, None), requests)
    pairs = zip(found.tokens, found.accept_lens, strict=True)
    return [row[:n].tolist() for row, n in pairs], found.next_anchors.tolist()


def logits_of(*tokens: int) -> torch.Tensor:
    """Logits ``[len(tokens), VOCABULARY]`` whose argmaxes are the tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def test_a_block_ends_at_its_first_broken_row_and_other_requests_do_not(verifier):
    tokens = torch.tensor([[7, 1, 2], [7, 1, 2], [7, 4, 2], [7, 1, 2], [7, 0, 2]])
    logits = logits_of(1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 0, 2, 3)
    logits[1, 5] = NAN  # after an accepted draft
    logits[7, 5] = NAN  # past the end of its block
    logits[11, 0] = INFINITY  # the bonus token's row
    logits[12] = -INFINITY  # its argmax would be the draft, 0
    emitted, anchors = accepted(verifier, tokens, logits)
    assert emitted == [[1, VOCABULARY], [1, 2, 3], [1], [1, 2, VOCABULARY], [VOCABULARY]]
    assert anchors == [0, 3, 1, 0, 0], "the next round may already run"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_without_drafts_ends_its_broken_rows(verifier, sampled):
    logits, tokens = logits_of(5, 2, 3), torch.tensor([[7], [7], [7]])
    logits[1, 6], logits[2] = NAN, -INFINITY
    expected = [[5], [VOCABULARY], [VOCABULARY]], [5, 0, 0]
    assert accepted(verifier, tokens, logits, sampled) == expected


def test_logprobs_index_by_tokens_of_the_vocabulary(verifier, monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "compute_spec_logprobs", lambda *g, **_: asked.append(g[2].tolist())
    )
    tokens = torch.tensor([[1, VOCABULARY]])
    committed = module.Committed(tokens, torch.tensor([2]), torch.tensor([0]))
    rows = SimpleNamespace(info=SimpleNamespace(sampling_mask_batch_indices=None))
    verifier.add_logprobs(SimpleNamespace(return_logprob=True), None, committed, rows)
    assert asked == [[1, VOCABULARY - 1]]
