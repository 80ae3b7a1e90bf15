"""Penalties of a block: of its rows, its drafts and one token at a time."""

from types import SimpleNamespace

import torch

from sglang_hyperdflash.draft.adjust import UNLIKELY, Adjustments, adjust_candidates, adjust_rows
from sglang_hyperdflash.serving.batch import GeneratedCounts
from sglang_hyperdflash.serving.verification import prefill
from sglang_hyperdflash.serving.verification.prefill import PrefillSampler
from sglang_hyperdflash.serving.verification.verifier import Verifier

VOCAB, BLOCK = 20, 5
GENERATED, PROMPT = 9, 7
# Of a request: frequency, presence and repetition penalties, its least new tokens, its end tokens.
SETTINGS = [
    ((0.7, 0.0, 1.0), 0, ()),
    ((0.0, -0.4, 1.0), 0, ()),
    ((0.0, 0.0, 1.3), GENERATED + 2, (2, 3)),
    ((-0.2, 0.9, 0.8), GENERATED + 3, (3,)),
    ((0.0, 0.0, 1.0), GENERATED + 1, (2, 3)),
    ((0.0, 0.0, 1.0), 0, ()),
]


def test_every_row_of_a_block_is_adjusted_as_its_draft_was_and_as_one_by_one():
    """SGLang's own penalties are those of a block's first row in all of them."""
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
    assert adjusted.isinf().sum() == 2 * 2 + 3 * 1 + 1 * 2
    ids = torch.arange(VOCAB).repeat(count, 1)
    candidates = [
        adjust_candidates(logits[:, k], ids, drafts[:, :k], positions[:, k], changes)
        for k in range(BLOCK)
    ]
    expected = adjusted.masked_fill(adjusted.isinf(), UNLIKELY)
    torch.testing.assert_close(torch.stack(candidates, 1), expected)
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
    verifier.runners = SimpleNamespace(logits_processor=None)
    block = SimpleNamespace(tokens=torch.zeros(2, 2))
    assert verifier.finish_logits(None, round_, block, requests, None, None) is None
    sampler = PrefillSampler(None, SimpleNamespace(current=requests), None)
    monkeypatch.setattr(prefill, "_sampler", sampler)
    prefill.penalise_prefill(lambda self, output, info: None, None, pre, None)
    for output in (round_, pre):
        found = output.next_token_logits
        assert torch.equal(found, logits) and found.is_contiguous()
