"""No row past the context reaches the target or the drafter, whatever is accepted."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving import worker as worker_module
from sglang_hyperdflash.serving.startup.dflash_seams import end_requests_early
from sglang_hyperdflash.serving.worker import HyperDFlashWorker

CONTEXT = 100


def worker(block: int, overlap: bool = True, one_row: bool = True) -> HyperDFlashWorker:
    """A worker that chooses a round's width, and nothing else; its policy chooses whole blocks."""
    found = object.__new__(HyperDFlashWorker)
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))
    found._target_worker = SimpleNamespace(model_runner=runner)
    found.block, found._width_1_allowed = block, one_row
    found._overlap, found._last_width = overlap, block
    found.width_control = SimpleNamespace(next=lambda *classes: block, started=lambda *round: None)
    return found


def rows_of(*reqs: SimpleNamespace) -> SimpleNamespace:
    info = SimpleNamespace(has_custom_logit_processor=False)
    return SimpleNamespace(reqs=reqs, info=info, classes=(len(reqs), 0))


def last_positions(
    block: int, prompt: int, overlap: bool, draw: random.Random, *, whole_blocks: bool = False
) -> list[int]:
    """The last position of each round of a request that fills its context.

    SGLang ends it at ``CONTEXT - 2`` tokens, earlier where every round is a whole block, counted
    when the host has read a round's result: under overlap scheduling one round late.
    """
    rounds = worker(block, overlap, not whole_blocks)
    if not whole_blocks:
        rounds.width_control.next = lambda *classes: draw.randint(1, block)
    request = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=prompt))
    info = (0, 0, 0, 0, CONTEXT - 1, CONTEXT - 6, *range(6))
    target = SimpleNamespace(rows_past_the_end=2 * block if whole_blocks else 0)
    longest = end_requests_early(info, target)[4]
    # Tokens with K/V, as the device has it; the next token is the anchor.
    length, unread, last = prompt, [], []
    while request.kv.kv_committed_len + 1 < longest - 1:
        width = rounds._choose_width(rows_of(request))
        last.append(length + width - 1)
        kept = draw.choice((1, width))
        length += kept
        unread.append(kept)
        if len(unread) > overlap:
            request.kv.kv_committed_len += unread.pop(0)
    return last


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block", [2, 7, 16])
def test_no_round_passes_the_end_of_a_context(block, overlap):
    draw = random.Random(0)
    for prompt in range(1, CONTEXT - 5):
        for _ in range(20):
            last = last_positions(block, prompt, overlap, draw)
            assert max(last) < CONTEXT
            # The position that answers the last token was computed.
            assert max(last) >= CONTEXT - 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block", [2, 7, 16])
def test_whole_blocks_alone_end_requests_before_the_end_of_a_context(block, overlap):
    draw = random.Random(0)
    for prompt in range(1, CONTEXT - 6 - 2 * block):
        last = last_positions(block, prompt, overlap, draw, whole_blocks=True)
        assert block - 1 <= max(last) < CONTEXT


def test_only_these_servers_end_requests_early():
    info = (0, 0, 0, 0, CONTEXT - 1, CONTEXT - 6, *range(6))
    assert end_requests_early(info, SimpleNamespace()) == info
    found = end_requests_early(info, SimpleNamespace(rows_past_the_end=14))
    assert found == (0, 0, 0, 0, CONTEXT - 15, CONTEXT - 20, *range(6))


def test_blocks_are_drafted_until_the_end_is_near_and_every_request_counts():
    rounds = worker(7)
    near, far = (
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n)) for n in (CONTEXT - 15, 40)
    )
    assert rounds._choose_width(rows_of(far, near)) == 7
    near.kv.kv_committed_len += 1
    assert rounds._choose_width(rows_of(far, near)) == 1
    # A round of one row is in flight now: the next block starts that much earlier.
    near.kv.kv_committed_len = CONTEXT - 9
    assert rounds._choose_width(rows_of(far, near)) == 7


def test_a_batch_with_a_custom_processor_has_rounds_of_one_row():
    """A processor is called once a token, as in the baseline; the other requests go along."""
    rounds, rows = worker(7), rows_of(SimpleNamespace(kv=SimpleNamespace(kv_committed_len=20)))
    rows.info.has_custom_logit_processor = True
    assert rounds._choose_width(rows) == 1
    rows.info.has_custom_logit_processor = False
    assert rounds._choose_width(rows) == 7


def test_the_control_without_the_rule_passes_the_end(monkeypatch):
    monkeypatch.setattr(worker_module, "block_fits", lambda *inputs: True)
    draw = random.Random(0)
    assert max(max(last_positions(7, 40, True, draw)) for _ in range(20)) >= CONTEXT
