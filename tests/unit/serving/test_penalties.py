"""Penalties of a block's rows against SGLang's own penalizers, fed one token at a time."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.draft.adjust import UNLIKELY, Adjustments, adjust_candidates, adjust_rows
from sglang_hyperdflash.serving.verification import exact, prefill
from sglang_hyperdflash.serving.verification.penalties import GeneratedCounts
from sglang_hyperdflash.serving.verification.prefill import PrefillSampler
from sglang_hyperdflash.serving.verification.verifier import Verifier

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


def penalties(settings, counts: torch.Tensor) -> Adjustments:
    """Of requests in slots 1, 2, ... of ``counts``."""
    chosen = [parameters(**s) for s in settings]
    values = [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in chosen]
    return Adjustments(counts, torch.arange(len(chosen)) + 1, torch.tensor(values))


def adjusted(logits: torch.Tensor, drafts: torch.Tensor, changes: Adjustments) -> torch.Tensor:
    """``logits [bs, B, V]`` of blocks of these drafts, adjusted."""
    out, anchors = logits.clone(), torch.zeros(len(drafts), 1, dtype=torch.int64)
    block = torch.cat([anchors, drafts], 1)
    adjust_rows(out, block, torch.arange(block.shape[1]).repeat(len(block), 1), *changes.tensors)
    return out


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
    mine = penalties(settings, counts.table)
    counts.add(mine.slots, generated[:, 4:], torch.full((len(settings),), 5))
    found = adjusted(logits, drafts, mine)
    ids = torch.arange(VOCAB).repeat(len(settings), 1)
    for k in range(BLOCK):
        # A draft's candidates change as the target's row does.
        scores = adjust_candidates(logits[:, k], ids, drafts[:, :k], drafts[:, 0], mine)
        torch.testing.assert_close(scores, found[:, k])
        for i, setting in enumerate(settings):
            before = [*generated[i].tolist(), *drafts[i, :k].tolist()]
            expected = sglang_logits(logits[i, k], setting, before)
            torch.testing.assert_close(found[i, k], expected, atol=2e-5, rtol=1e-5)


def test_a_frozen_block_would_be_wrong():
    """What SGLang does: one row's penalties for all; the test above can tell."""
    logits = torch.zeros(1, BLOCK, VOCAB)
    drafts = torch.tensor([[3, 3, 4, 5]])
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    found = adjusted(logits, drafts, penalties([SETTINGS["frequency"]], counts))
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


PROMPTS, LENGTHS, MINIMUM = [10, 4, 6], torch.tensor([13, 9, 6]), [5, 0, 2]
# Of the second request nothing is forbidden; the first ends with two tokens, the third with one.
ENDS = Adjustments(
    end_ids=torch.tensor([[2, 3], [-1, -1], [3, -1]]),
    earliest=torch.tensor([prompt + least for prompt, least in zip(PROMPTS, MINIMUM, strict=True)]),
)


def expected_ends(logits: torch.Tensor, request: int, ahead: int) -> torch.Tensor:
    """One row through SGLang's penalizer, ``ahead`` tokens after the first of its block."""
    out = int(LENGTHS[request]) - PROMPTS[request] + ahead
    setting = {"min_new_tokens": MINIMUM[request]}
    found = sglang_logits(logits, setting, [11] * out)
    if request == 2:
        found[2] = logits[2]
    return found


def test_end_tokens_stay_impossible_until_enough_is_out():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, BLOCK, VOCAB, generator=generator)
    original = logits.clone()
    block = torch.zeros(3, BLOCK, dtype=torch.int64)
    # A context ends with its anchor.
    positions = LENGTHS.unsqueeze(1) - 1 + torch.arange(BLOCK)
    adjust_rows(logits, block, positions, *ENDS.tensors)
    ids = torch.arange(VOCAB).repeat(3, 1)
    forbidden = 0
    for i in range(3):
        for k in range(BLOCK):
            assert torch.equal(logits[i, k], expected_ends(original[i, k], i, k)), (i, k)
            scores = adjust_candidates(original[:, k], ids, block[:, :k], positions[:, k], ENDS)[i]
            impossible = logits[i, k].isinf()
            assert torch.equal(scores, original[i, k].masked_fill(impossible, UNLIKELY))
            forbidden += int(impossible.sum())
    assert forbidden == 2 * 2 + 2


def test_a_prefill_s_rows_are_penalised_as_a_round_s():
    """Its lengths have the last row already, those of a round no anchor."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCAB, generator=generator)
    counts = GeneratedCounts(4, VOCAB, "cpu")
    counts.reset(3, [4, 4, 7])
    mine = penalties([SETTINGS[name] for name in ("none", "none", "all")], counts.table)
    changes = Adjustments(*mine.tensors[:3], *ENDS.tensors[3:])
    asked = []
    requests = SimpleNamespace(
        lengths=LENGTHS.int(), changes=lambda **a: asked.append(a) or changes
    )
    found = logits.clone()
    PrefillSampler(None, SimpleNamespace(current=requests), None).penalise(found)
    assert asked == [{"bias": False}], "SGLang adds it afterwards"
    for i in range(3):
        generated = [4, 4, 7] if i == 2 else []
        expected = sglang_logits(logits[i], SETTINGS["all"] if generated else {}, generated)
        expected[expected_ends(logits[i], i, 0).isinf()] = float("-inf")
        torch.testing.assert_close(found[i], expected, atol=2e-5, rtol=1e-5)
    assert found.isinf().sum(1).tolist() == [2, 0, 1]
    none = SimpleNamespace(changes=lambda bias: None)
    PrefillSampler(None, SimpleNamespace(current=none), None).penalise(None)


def columns(logits: torch.Tensor) -> torch.Tensor:
    """As ``LogitsProcessor._gather_attn_tp_logits`` gives them to ranks that share unevenly."""
    return logits.T.contiguous().T


def test_logits_that_lie_in_columns_are_rows_before_anything_reads_them(monkeypatch):
    """Kernels read rows: a batch's final logits, and a prefill's before its penalties."""
    logits = torch.randn(4, VOCAB)
    output = SimpleNamespace(next_token_logits=columns(logits))
    info = SimpleNamespace(has_custom_logit_processor=False)
    requests = SimpleNamespace(changes=lambda: None, info=info)
    verifier = object.__new__(Verifier)
    verifier.worker = SimpleNamespace(_target_logits_processor=None)
    block = SimpleNamespace(tokens=torch.zeros(2, 2))
    assert verifier.finish_logits(None, output, block, requests, None, None) is None
    seen = [output.next_token_logits]

    requests.changes = lambda bias: seen.append(bias)
    state = SimpleNamespace(current=requests)
    monkeypatch.setattr(prefill, "_sampler", PrefillSampler(None, state, None))
    output = SimpleNamespace(next_token_logits=columns(logits))
    prefill.penalise_prefill(lambda self, output, info: seen.append(output), None, output, None)
    assert seen[1:] == [False, output]
    for found in (seen[0], output.next_token_logits):
        assert torch.equal(found, logits) and found.is_contiguous()
    rows = SimpleNamespace(next_token_logits=logits)
    exact.lay_out_rows(rows)
    assert rows.next_token_logits is logits, "no copy of what are rows already"
