"""Penalties of a block's rows against SGLang's own penalizers, fed one token at a time."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving.verification.penalties import EndTokens, GeneratedCounts, Penalties

VOCAB, BLOCK = 20, 5
SETTINGS = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"frequency_penalty": -0.2, "presence_penalty": 0.9, "repetition_penalty": 0.8},
    "none": {},
}


def parameters(**values):
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
    }
    return SimpleNamespace(**neutral | values)


class Batch(SimpleNamespace):
    """What a weak reference can point to."""


def sglang_logits(logits, setting, generated):
    """One row through SGLang's orchestrator after ``generated`` tokens."""
    from sglang.srt.sampling import penaltylib

    req = SimpleNamespace(
        sampling_params=parameters(**setting),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3),
    )
    batch = Batch(reqs=[req], device="cpu")
    penalizers = (
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    )
    # A list: a set would have no order, and scaling comes last.
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, penalizers)
    for token in generated:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    row = logits.clone().unsqueeze(0)
    if orchestrator.is_required:
        orchestrator.apply(row)
    return row[0]


def penalties(settings) -> Penalties:
    chosen = [parameters(**s) for s in settings]
    rows = torch.arange(len(chosen))
    columns = (
        torch.tensor([[getattr(p, f"{name}_penalty")] for p in chosen])
        for name in ("frequency", "presence", "repetition")
    )
    return Penalties(rows, rows + 1, *columns)


def test_every_row_of_a_block_has_the_penalties_of_what_it_follows():
    generator = torch.Generator().manual_seed(0)
    settings = list(SETTINGS.values())
    logits = torch.randn(len(settings), BLOCK, VOCAB, generator=generator) * 3
    # Few different tokens: drafts repeat one another and what was generated.
    generated = torch.randint(0, 6, (len(settings), 9), generator=generator)
    drafts = torch.randint(0, 8, (len(settings), BLOCK - 1), generator=generator)
    counts = GeneratedCounts(len(settings) + 1, VOCAB, "cpu")
    for i in range(len(settings)):
        counts.reset(i + 1, generated[i, :4].tolist())
    mine = penalties(settings)
    counts.add(mine.slots, generated[:, 4:], torch.full((len(settings),), 5))
    found = mine.apply_to_block(logits, counts.table[mine.slots], drafts)
    for i, setting in enumerate(settings):
        for k in range(BLOCK):
            before = [*generated[i].tolist(), *drafts[i, :k].tolist()]
            expected = sglang_logits(logits[i, k], setting, before)
            torch.testing.assert_close(found[i, k], expected, atol=2e-5, rtol=1e-5)


def test_a_frozen_block_would_be_wrong():
    """What SGLang does: one row's penalties for all; the test above can tell."""
    logits = torch.zeros(1, BLOCK, VOCAB)
    drafts = torch.tensor([[3, 3, 4, 5]])
    mine = penalties([SETTINGS["frequency"]])
    counts = torch.zeros(1, VOCAB, dtype=torch.int32)
    found = mine.apply_to_block(logits, counts, drafts)
    assert found[0, :, 3].tolist() == pytest.approx([0.0, -0.7, -1.4, -1.4, -1.4])
    assert not torch.equal(found[:, :1].expand_as(found), found)


def test_only_the_committed_part_of_a_block_is_counted():
    counts = GeneratedCounts(4, VOCAB, "cpu")
    counts.reset(2, [7, 7])
    slots, tokens = torch.tensor([2, 3]), torch.tensor([[7, 1, 1], [5, 5, 5]])
    counts.add(slots, tokens, torch.tensor([2, 0]))
    assert counts.table[2].nonzero().flatten().tolist() == [1, 7]
    assert counts.table[2, [1, 7]].tolist() == [1, 3]
    assert int(counts.table[3].sum()) == 0
    # A slot's next request starts anew, and so does one that was retracted.
    counts.reset(2, [9])
    assert counts.table[2].nonzero().flatten().tolist() == [9]


def test_a_request_that_goes_on_is_counted_without_a_wait_for_the_device(monkeypatch):
    """After a retraction; a copy of a whole row from pageable memory waits for every round."""
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    monkeypatch.setattr(torch, "bincount", None)
    counts = GeneratedCounts(2, VOCAB, "cpu")
    counts.reset(1, array("q", [5, 3, 5]))
    assert counts.table[1, [3, 5]].tolist() == [1, 2] and int(counts.table.sum()) == 3


def test_end_tokens_stay_impossible_until_enough_is_out():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, BLOCK, VOCAB, generator=generator)
    original = logits.clone()
    prompts, contexts = [10, 4, 6], torch.tensor([13, 9, 6])
    minimum = {0: 5, 2: 2}
    ends = EndTokens(
        torch.tensor([0, 2]),
        torch.tensor(list(minimum.values())),
        torch.tensor([prompts[i] for i in minimum]),
        torch.tensor([[2, 3], [2, 3]]),
    )
    ends.forbid(logits, contexts)
    for i in range(3):
        for k in range(BLOCK):
            setting = {"min_new_tokens": minimum.get(i, 0)}
            out = int(contexts[i]) - prompts[i] + k
            expected = sglang_logits(original[i, k], setting, [11] * out)
            assert torch.equal(logits[i, k], expected), (i, k)
