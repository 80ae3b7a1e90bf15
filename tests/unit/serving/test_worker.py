"""The worker's widths, of which none passes a context, and its rehearsal of the largest batch."""

import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_hyperdflash.serving.startup.dflash_seams import end_requests_early
from sglang_hyperdflash.serving.worker import HyperDFlashWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

CONTEXT = 100
# SGLang's limits of requests: their length and their prompt's.
INFO = (0, 0, 0, 0, CONTEXT - 1, CONTEXT - 6, *range(6))


def worker(block: int, overlap: bool = True, one_row: bool = True) -> HyperDFlashWorker:
    """A worker that chooses a round's width, and nothing else; its policy chooses whole blocks."""
    found = object.__new__(HyperDFlashWorker)
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))
    found.runners = SimpleNamespace(target=runner)
    found.block, found._width_1_allowed = block, one_row
    found._overlap, found._last_width = overlap, block
    found.width_control = SimpleNamespace(next=lambda *classes: block, started=lambda *round: None)
    return found


def request(committed: int) -> SimpleNamespace:
    return SimpleNamespace(kv=SimpleNamespace(kv_committed_len=committed))


def rows_of(*reqs: SimpleNamespace, processor: bool = False) -> SimpleNamespace:
    info = SimpleNamespace(has_custom_logit_processor=processor)
    return SimpleNamespace(reqs=reqs, info=info, classes=(len(reqs), 0))


def last_position(block: int, prompt: int, overlap, draw: random.Random, whole_blocks) -> int:
    """The last position that a request computes which fills its context.

    SGLang ends it at ``CONTEXT - 2`` tokens, earlier where every round is a whole block, counted
    when the host has read a round's result: under overlap scheduling one round late.
    """
    rounds, req = worker(block, overlap, not whole_blocks), request(prompt)
    if not whole_blocks:
        rounds.width_control.next = lambda *classes: draw.randint(1, block)
    target = SimpleNamespace(rows_past_the_end=2 * block if whole_blocks else 0)
    longest = end_requests_early(INFO, target)[4]
    # Tokens with K/V, as the device has it; the next token is the anchor.
    length, unread, last = prompt, [], []
    while req.kv.kv_committed_len + 1 < longest - 1:
        width = rounds._choose_width(rows_of(req), [])
        last.append(length + width - 1)
        kept = draw.choice((1, width))
        length += kept
        unread.append(kept)
        if len(unread) > overlap:
            req.kv.kv_committed_len += unread.pop(0)
    return max(last)


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block", [2, 7, 16])
def test_no_round_passes_the_end_of_a_context(block, overlap, whole_blocks):
    """And the position that answers the last token is computed, where rounds may be narrow."""
    draw, least = random.Random(0), block - 1 if whole_blocks else CONTEXT - 4
    for prompt in range(1, CONTEXT - 6 - 2 * block * whole_blocks):
        for _ in range(1 if whole_blocks else 5):
            assert least <= last_position(block, prompt, overlap, draw, whole_blocks) < CONTEXT


def test_only_servers_of_whole_blocks_end_requests_early():
    assert end_requests_early(INFO, SimpleNamespace()) == INFO
    found = end_requests_early(INFO, SimpleNamespace(rows_past_the_end=14))
    assert found == (0, 0, 0, 0, CONTEXT - 15, CONTEXT - 20, *range(6))


def test_blocks_are_drafted_until_the_end_is_near_and_every_request_counts():
    rounds, near, far = worker(7), request(CONTEXT - 15), request(40)
    assert rounds._choose_width(rows_of(far, near), []) == 7
    near.kv.kv_committed_len += 1
    assert rounds._choose_width(rows_of(far, near), []) == 1
    # A round of one row is in flight now: the next block starts that much earlier.
    near.kv.kv_committed_len = CONTEXT - 9
    assert rounds._choose_width(rows_of(far, near), []) == 7
    # A custom processor is called once a token, as in the baseline; other requests go along.
    assert rounds._choose_width(rows_of(far, processor=True), []) == 1


def test_the_largest_batch_that_is_served_is_rehearsed(monkeypatch):
    worker = object.__new__(HyperDFlashWorker)
    worker.block = 7
    for running, captured, prefills, expected in (
        (256, 32, False, 256),  # larger batches than the captured ones verify eagerly
        (8, 32, False, 8),
        (None, 32, False, 32),
        (1024, 1, True, 1),
    ):
        worker._prefills_only = prefills
        worker.model_runner = SimpleNamespace(
            max_running_requests=running, max_decode_logits_rows=lambda rows=7 * captured: rows
        )
        assert worker._prewarm_batch_size(7) == expected
    full = Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr(DFlashWorkerV2, "prewarm_sampling", full)
    worker._prefills_only, made = False, []
    worker.request_state = type("State", (), {"counts": property(made.append)})()
    with pytest.raises(HyperDFlashConfigError, match="--max-running"):
        worker.prewarm_sampling()
    assert made, "counts of penalties take their memory at the start, too"
