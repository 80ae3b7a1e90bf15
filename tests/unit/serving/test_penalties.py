"""Penalties of a block's rows against SGLang's own penalizers, fed one token at a time."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.sampling import penaltylib

from sglang_hyperdflash.draft.adjust import UNLIKELY, Adjustments, adjust_candidates, adjust_rows
from sglang_hyperdflash.serving.verification import prefill
from sglang_hyperdflash.serving.verification.penalties import GeneratedCounts
from sglang_hyperdflash.serving.verification.prefill import PrefillSampler
from sglang_hyperdflash.serving.verification.verifier import Verifier

VOCAB, BLOCK = 20, 5
GENERATED, PROMPT = 9, 7
# Of a request: frequency, presence and repetition penalties, its least new tokens, its end tokens.
NONE, ALL = (0.0, 0.0, 1.0), (-0.2, 0.9, 0.8)
SETTINGS = [
    ((0.7, 0.0, 1.0), 0, ()),
    ((0.0, -0.4, 1.0), 0, ()),
    ((0.0, 0.0, 1.3), GENERATED + 2, (2, 3)),
    (ALL, GENERATED + 3, (3,)),
    (NONE, GENERATED + 1, (2, 3)),
    (NONE, 0, ()),
]


class Batch(SimpleNamespace):
    """What a weak reference can point to."""


def sglang_logits(logits, generated, penalties, minimum, ends):
    """One row through SGLang's orchestrator after ``generated`` tokens."""
    frequency, presence, repetition = penalties
    params = SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=minimum,
        stop_token_ids=set(ends),
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3)
    req = SimpleNamespace(sampling_params=params, eos_token_ids=None, tokenizer=tokenizer)
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
    """Not those of the block's first row, as in SGLang; a prefill's row has those of a round."""
    generator, count = torch.Generator().manual_seed(0), len(SETTINGS)
    logits = torch.randn(count, BLOCK, VOCAB, generator=generator) * 3
    # Few different tokens: drafts repeat one another and what was generated.
    generated = torch.randint(0, 6, (count, GENERATED), generator=generator)
    drafts = torch.randint(0, 8, (count, BLOCK - 1), generator=generator)
    counts, slots = GeneratedCounts(count + 1, VOCAB, "cpu"), torch.arange(count) + 1
    counts.table.fill_(7)  # of these slots' requests before
    for i in range(count):
        counts.reset(i + 1, generated[i, :4].tolist())
    counts.add(slots, generated[:, 4:], torch.full((count,), GENERATED - 4))
    penalties, least, ends = zip(*SETTINGS, strict=True)
    end_ids = torch.tensor([[*each, -1, -1][:2] for each in ends])
    earliest = PROMPT + torch.tensor(least)
    changes = Adjustments(counts.table, slots, torch.tensor(penalties), end_ids, earliest)
    adjusted, block = logits.clone(), torch.cat([generated[:, -1:], drafts], 1)
    # A context ends with its anchor.
    positions = (PROMPT + GENERATED - 1 + torch.arange(BLOCK)).repeat(count, 1)
    adjust_rows(adjusted, block, positions, *changes.tensors)
    ids = torch.arange(VOCAB).repeat(count, 1)
    for k in range(BLOCK):
        # A draft's candidates change as the target's row does.
        scores = adjust_candidates(logits[:, k], ids, drafts[:, :k], positions[:, k], changes)
        impossible = adjusted[:, k].isinf()
        torch.testing.assert_close(scores, adjusted[:, k].masked_fill(impossible, UNLIKELY))
        for i, setting in enumerate(SETTINGS):
            before = [*generated[i].tolist(), *drafts[i, :k].tolist()]
            expected = sglang_logits(logits[i, k], before, *setting)
            torch.testing.assert_close(adjusted[i, k], expected, atol=2e-5, rtol=1e-5)
    assert adjusted.isinf().sum() == 2 * 2 + 3 * 1 + 1 * 2
    for k in range(BLOCK):  # after k drafts; SGLang adds the bias afterwards
        lengths, row = positions[:, k].int() + 1, logits[:, k].clone()
        requests = SimpleNamespace(lengths=lengths, changes=lambda bias: None if bias else changes)
        PrefillSampler(None, SimpleNamespace(current=requests), None).penalise(row)
        torch.testing.assert_close(row, adjusted[:, k])
        counts.add(slots, block[:, k + 1 : k + 2], torch.ones(count))


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
