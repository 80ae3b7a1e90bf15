"""Broken rows of logits that tensor-parallel ranks never gather."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context

from sglang_hyperdflash.serving import sampled_worker, sampling_seams
from sglang_hyperdflash.serving.one_row import OneRowWorker
from sglang_hyperdflash.serving.sampling_seams import BROKEN, argmax_of_shards

RANKS, SHARD, VOCABULARY = 3, 4, 7
NAN, INFINITY = float("nan"), float("inf")


class Group:
    """A tensor-parallel group as one of its ranks sees it."""

    world_size = RANKS

    def __init__(self, rank: int, sent: dict[int, torch.Tensor]) -> None:
        self.rank_in_group, self.sent = rank, sent

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self.sent[self.rank_in_group] = own
        for rank, one in self.sent.items():
            output[rank] = one


def tokens_on_ranks(logits: torch.Tensor) -> list[list[int]]:
    """What each rank makes of ``logits [rows, RANKS * SHARD]``, of which VOCABULARY are real."""
    capped = logits[:, :VOCABULARY].tanh().nan_to_num(nan=-INFINITY)  # SGLang's maximum skips NaN
    processor, sent = SimpleNamespace(vocab_size=VOCABULARY), {}
    found = []
    for rank in (*range(RANKS), *range(RANKS)):  # twice: the first time tells what all send
        parallel = SimpleNamespace(tp_group=Group(rank, sent))
        with mock.patch.object(runtime_context, "get_parallel", lambda given=parallel: given):
            own = logits[:, rank * SHARD : (rank + 1) * SHARD]
            found.append(
                argmax_of_shards(lambda *given: capped.argmax(-1), processor, own).tolist()
            )
    return found[RANKS:]


def test_every_rank_tells_a_nan_of_any_rank_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sampling_seams, "_worker", object())
    logits = torch.zeros(6, RANKS * SHARD)
    logits[:, 2] = 1.0
    logits[1, 0], logits[2, 6], logits[5] = NAN, NAN, NAN
    # Padding, and infinities that a softcap makes finite.
    logits[3, VOCABULARY:], logits[4, 5] = NAN, INFINITY
    expected = [2, BROKEN, BROKEN, 2, 5, BROKEN]
    logits[4, 2] = -1.0
    assert tokens_on_ranks(logits) == [expected] * RANKS
    monkeypatch.setattr(sampling_seams, "_worker", None)
    assert BROKEN not in tokens_on_ranks(logits)[0], "SGLang tells it: the seam is not needed"


@pytest.fixture
def worker():
    """A greedy round's part of a worker whose target defers its gather."""
    made = object.__new__(OneRowWorker)
    made.requests = SimpleNamespace(greedy=True)
    made._proposal = made._broken = None
    made._count = lambda *inputs: None
    made._tp_sync = SimpleNamespace(sync=lambda site, tokens: tokens)
    return made


def test_a_block_ends_at_its_first_broken_row_though_no_logits_are_gathered(worker, monkeypatch):
    def accepted(self, *, candidates, target_predict, bs, **rest):
        predicted = target_predict.view(bs, -1)
        length = (candidates[:, 1:] == predicted[:, :-1]).int().cumprod(1).sum(1)
        bonus = predicted.gather(1, length.unsqueeze(1)).squeeze(1).clone()
        return length.int(), length.int() + 1, bonus, predicted.clone(), None

    monkeypatch.setattr(sampled_worker.WindowedWorker, "_accept_block", accepted)
    candidates = torch.tensor([[9, 1, 2], [9, 1, 2], [9, 4, 2]])
    predicted = torch.tensor([1, BROKEN, 3, 1, 2, 3, 1, BROKEN, BROKEN])
    length, _, bonus, tokens, _ = worker._accept_block(
        candidates=candidates,
        next_token_logits=None,
        sampling_info=SimpleNamespace(is_all_greedy=True),
        draft_input=None,
        prefix_lens=None,
        bs=3,
        target_predict=predicted,
    )
    assert length.tolist() == [1, 2, 0] and bonus.tolist() == [0, 3, 1]
    assert worker._broken.tolist() == [True, False, False]
    assert int(tokens.min()) >= 0


def test_a_round_without_drafts_remembers_its_broken_rows(worker):
    processor = SimpleNamespace(
        is_deferred_shard=lambda logits: True,
        deferred_argmax=lambda logits: torch.tensor([5, BROKEN]),
    )
    worker._target_logits_processor = processor
    worker._can_skip_verify_logits = lambda batch, info: True
    output = SimpleNamespace(next_token_logits=torch.zeros(2, 4))
    batch = SimpleNamespace(sampling_info=None)
    tokens = worker._token_of_row(batch, output, None, None, None)
    assert tokens.tolist() == [5, 0] and worker._broken.tolist() == [False, True]
