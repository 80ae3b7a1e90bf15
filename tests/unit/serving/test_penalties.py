"""Penalties of a block's rows against SGLang's own penalizers, fed one token at a time."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.sampling import penaltylib

from sglang_hyperdflash.draft.adjust import UNLIKELY, Adjustments, adjust_candidates, adjust_rows
from sglang_hyperdflash.serving.verification import exact, prefill
from sglang_hyperdflash.serving.verification.penalties import GeneratedCounts
from sglang_hyperdflash.serving.verification.prefill import PrefillSampler
from sglang_hyperdflash.serving.verification.verifier import Verifier

VOCAB, BLOCK = 20, 5
# Frequency, presence, repetition.
NONE, ALL = (0.0, 0.0, 1.0), (-0.2, 0.9, 0.8)
SETTINGS = [(0.7, 0.0, 1.0), (0.0, -0.4, 1.0), (0.0, 0.0, 1.3), ALL, NONE]


class Batch(SimpleNamespace):
    """What a weak reference can point to."""


def sglang_logits(logits, generated, penalties=NONE, minimum=0):
    """One row through SGLang's orchestrator after ``generated`` tokens."""
    frequency, presence, repetition = penalties
    params = SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=minimum,
        stop_token_ids=None,
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3)
    req = SimpleNamespace(sampling_params=params, eos_token_ids={2}, tokenizer=tokenizer)
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


def test_every_row_of_a_block_has_the_penalties_of_what_it_follows():
    """Not those of the block's first row, as in SGLang."""
    generator, count = torch.Generator().manual_seed(0), len(SETTINGS)
    logits = torch.randn(count, BLOCK, VOCAB, generator=generator) * 3
    # Few different tokens: drafts repeat one another and what was generated.
    generated = torch.randint(0, 6, (count, 9), generator=generator)
    drafts = torch.randint(0, 8, (count, BLOCK - 1), generator=generator)
    counts, slots = GeneratedCounts(count + 1, VOCAB, "cpu"), torch.arange(count) + 1
    for i in range(count):
        counts.reset(i + 1, generated[i, :4].tolist())
    changes = Adjustments(counts.table, slots, torch.tensor(SETTINGS))
    counts.add(slots, generated[:, 4:], torch.full((count,), 5))
    found = logits.clone()
    block = torch.cat([torch.zeros(count, 1, dtype=torch.int64), drafts], 1)
    adjust_rows(found, block, torch.arange(BLOCK).repeat(count, 1), *changes.tensors)
    ids = torch.arange(VOCAB).repeat(count, 1)
    for k in range(BLOCK):
        # A draft's candidates change as the target's row does.
        scores = adjust_candidates(logits[:, k], ids, drafts[:, :k], drafts[:, 0], changes)
        torch.testing.assert_close(scores, found[:, k])
        for i, penalties in enumerate(SETTINGS):
            before = [*generated[i].tolist(), *drafts[i, :k].tolist()]
            expected = sglang_logits(logits[i, k], before, penalties)
            torch.testing.assert_close(found[i, k], expected, atol=2e-5, rtol=1e-5)


def test_only_the_committed_part_of_a_block_is_counted(monkeypatch):
    """A retracted request goes on without a wait for the device, as a copy of a row would be."""
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    counts = GeneratedCounts(4, VOCAB, "cpu")
    counts.reset(2, array("q", [7, 7]))
    slots, tokens = torch.tensor([2, 3]), torch.tensor([[7, 1, 1], [5, 5, 5]])
    counts.add(slots, tokens, torch.tensor([2, 0]))
    assert counts.table[2].nonzero().flatten().tolist() == [1, 7]
    assert counts.table[2, [1, 7]].tolist() == [1, 3] and int(counts.table[3].sum()) == 0
    counts.reset(2, [9])  # a slot's next request starts anew
    assert counts.table[2].nonzero().flatten().tolist() == [9]


PROMPTS, LENGTHS, MINIMUM = [10, 4, 6], torch.tensor([13, 9, 6]), [5, 0, 2]
# Of the second request nothing is forbidden; the first ends with two tokens, the third with one.
ENDS = Adjustments(
    end_ids=torch.tensor([[2, 3], [-1, -1], [3, -1]]),
    earliest=torch.tensor([prompt + least for prompt, least in zip(PROMPTS, MINIMUM, strict=True)]),
)


def expected_ends(logits: torch.Tensor, request: int, ahead: int) -> torch.Tensor:
    """One row through SGLang's penalizer, ``ahead`` tokens after the first of its block."""
    out = int(LENGTHS[request]) - PROMPTS[request] + ahead
    found = sglang_logits(logits, [11] * out, minimum=MINIMUM[request])
    if request == 2:
        found[2] = logits[2]
    return found


def test_end_tokens_stay_impossible_until_enough_is_out():
    original = torch.randn(3, BLOCK, VOCAB, generator=torch.Generator().manual_seed(1))
    logits, block = original.clone(), torch.zeros(3, BLOCK, dtype=torch.int64)
    # A context ends with its anchor.
    positions = LENGTHS.unsqueeze(1) - 1 + torch.arange(BLOCK)
    adjust_rows(logits, block, positions, *ENDS.tensors)
    ids = torch.arange(VOCAB).repeat(3, 1)
    for k in range(BLOCK):
        scores = adjust_candidates(original[:, k], ids, block[:, :k], positions[:, k], ENDS)
        for i in range(3):
            assert torch.equal(logits[i, k], expected_ends(original[i, k], i, k)), (i, k)
            impossible = logits[i, k].isinf()
            assert torch.equal(scores[i], original[i, k].masked_fill(impossible, UNLIKELY))
    assert logits.isinf().sum() == 2 * 2 + 2


def test_a_prefill_s_rows_are_penalised_as_a_round_s():
    """Its lengths have the last row already, those of a round no anchor."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    counts, asked = GeneratedCounts(4, VOCAB, "cpu"), []
    counts.reset(3, [4, 4, 7])
    penalties = counts.table, torch.arange(3) + 1, torch.tensor([NONE, NONE, ALL])
    changes = Adjustments(*penalties, *ENDS.tensors[3:])
    state = SimpleNamespace(current=None)
    for ahead in range(3):  # to the last forbidden end
        state.current = SimpleNamespace(
            lengths=LENGTHS.int() + ahead, changes=lambda **a: asked.append(a) or changes
        )
        found = logits.clone()
        PrefillSampler(None, state, None).penalise(found)
        for i in range(3):
            own = ([4, 4, 7], ALL) if i == 2 else ([], NONE)
            expected = sglang_logits(logits[i], *own)
            expected[expected_ends(logits[i], i, ahead).isinf()] = float("-inf")
            torch.testing.assert_close(found[i], expected, atol=2e-5, rtol=1e-5)
    assert asked == [{"bias": False}] * 3, "SGLang adds it afterwards"


def test_logits_that_lie_in_columns_are_rows_before_anything_reads_them(monkeypatch):
    """As ranks that share a vocabulary unevenly gather them: of a round, and of a prefill."""
    logits = torch.randn(4, VOCAB)
    round_, pre = (SimpleNamespace(next_token_logits=logits.T.contiguous().T) for _ in range(2))
    info = SimpleNamespace(has_custom_logit_processor=False)
    requests = SimpleNamespace(changes=lambda bias=True: None, info=info)
    verifier = object.__new__(Verifier)
    verifier.worker = SimpleNamespace(_target_logits_processor=None)
    block = SimpleNamespace(tokens=torch.zeros(2, 2))
    assert verifier.finish_logits(None, round_, block, requests, None, None) is None
    sampler = PrefillSampler(None, SimpleNamespace(current=requests), None)
    monkeypatch.setattr(prefill, "_sampler", sampler)
    prefill.penalise_prefill(lambda self, output, info: None, None, pre, None)
    for output in (round_, pre):
        found = output.next_token_logits
        assert torch.equal(found, logits) and found.is_contiguous()
        exact.lay_out_rows(output)
        assert output.next_token_logits is found, "no copy of what are rows already"
