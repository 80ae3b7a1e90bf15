"""A broken row ends its block and its request; the next round's anchor stays a token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving import sampled_worker
from sglang_hyperdflash.serving.one_row import OneRowWorker

VOCABULARY = 8
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def worker():
    """A greedy round's part of a worker."""
    made = object.__new__(OneRowWorker)
    config = SimpleNamespace(vocab_size=VOCABULARY)
    made._target_worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
    made.requests = SimpleNamespace(greedy=True)
    made._proposal = made._broken = made._target_logits_processor = None
    made._count = made._adjust_block = lambda *inputs: None
    made._tp_sync = SimpleNamespace(sync=lambda site, tokens: tokens)
    return made


def rows(*tokens: int) -> torch.Tensor:
    """Logits ``[len(tokens), VOCABULARY]`` whose argmaxes are the tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def accepted(self, *, candidates, target_predict, bs, **rest):
    """SGLang's acceptance of greedy blocks."""
    predicted = target_predict.view(bs, -1)
    length = (candidates[:, 1:] == predicted[:, :-1]).int().cumprod(1).sum(1)
    bonus = predicted.gather(1, length.unsqueeze(1)).squeeze(1).clone()
    return length.int(), length.int() + 1, bonus, predicted.clone(), None


def test_a_block_ends_at_its_first_broken_row_and_batchmates_do_not(worker, monkeypatch):
    monkeypatch.setattr(sampled_worker.WindowedWorker, "_accept_block", accepted)
    candidates = torch.tensor([[7, 1, 2], [7, 1, 2], [7, 4, 2], [7, 1, 2], [7, 0, 2]])
    logits = rows(1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 0, 2, 3)
    logits[1, 5] = NAN  # after an accepted draft
    logits[7, 5] = NAN  # past the end of its block
    logits[11, 0] = INFINITY  # the bonus token's row
    logits[12] = -INFINITY  # its argmax would be the draft, 0
    length, commit, bonus, tokens, _ = worker._accept_block(
        candidates=candidates,
        next_token_logits=logits,
        sampling_info=SimpleNamespace(is_all_greedy=True),
        draft_input=None,
        prefix_lens=None,
        bs=5,
    )
    assert length.tolist() == [1, 2, 0, 2, 0]
    assert bonus.tolist() == [0, 3, 1, 0, 0]
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY  # logprobs index by them
    result = SimpleNamespace(next_token_ids=tokens.reshape(-1), accept_lens=commit)
    worker._end_broken_requests(result)
    emitted = result.next_token_ids.view(5, 3)
    emitted = [row[:n].tolist() for row, n in zip(emitted, commit, strict=True)]
    assert emitted == [[1, VOCABULARY], [1, 2, 3], [1], [1, 2, VOCABULARY], [VOCABULARY]]


def test_a_round_without_drafts_ends_its_broken_rows(worker):
    logits = rows(5, 2, 3)
    logits[1, 6], logits[2] = NAN, -INFINITY
    output = SimpleNamespace(next_token_logits=logits)
    batch = SimpleNamespace(sampling_info=SimpleNamespace(is_all_greedy=True))
    tokens = worker._token_of_row(batch, output, None, None, None)
    assert tokens.tolist() == [5, 0, 0]
    result = SimpleNamespace(next_token_ids=tokens)
    worker._end_broken_requests(result)
    assert result.next_token_ids.tolist() == [5, VOCABULARY, VOCABULARY]
