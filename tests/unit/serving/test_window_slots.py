"""The ring of draft K/V slots, against a plain Python bookkeeping of who wrote what last."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_hyperdflash.serving.draft_kv.window import DraftWindow


class Plain:
    """Slots as a list of owners; ids as a dictionary."""

    def __init__(self, ring: int, window: int) -> None:
        self.ring, self.window, self.head = ring, window, 0
        self.owner: list[int | None] = [None] * ring
        self.slot_of: dict[int, int] = {}

    def enter(self, ids: list[int], kept: list[bool]) -> list[int]:
        slots = []
        for token, keep in zip(ids, kept, strict=True):
            self.slot_of.pop(token, None)
            if keep:
                self.slot_of[token] = self.head
                slots.append(self.head + 1)
                self.head = (self.head + 1) % self.ring
            else:
                slots.append(0)
        for token, keep in zip(ids, kept, strict=True):
            if keep:
                self.owner[self.slot_of[token]] = token
        return slots

    def view(self, context: list[int]) -> list[int]:
        """Slots of the longest live suffix of at most W tokens, oldest first."""
        found: list[int] = []
        for token in context[: -self.window - 1 : -1]:
            slot = self.slot_of.get(token)
            if slot is None or self.owner[slot] != token:
                break
            found.append(slot + 1)
        return found[::-1]


def window(**options) -> DraftWindow:
    sizes = {"tokens": 400, "ring": 40, "window": 8, "block": 3, "batch": 4, "device": "cpu"}
    return DraftWindow(**sizes | options)


def test_random_traffic_matches_plain_bookkeeping():
    generator = random.Random(0)
    ours, plain = window(), Plain(40, 8)
    table = torch.zeros(5, 100, dtype=torch.int32)
    contexts: dict[int, list[int]] = {}
    free = list(range(1, 400))
    generator.shuffle(free)
    partly_lost = 0
    for _ in range(600):
        row = generator.randrange(1, 5)
        if row not in contexts or len(contexts[row]) > 80:
            free += contexts.pop(row, [])  # ids are given to other tokens later
            shared = generator.choice([[], *contexts.values()])[:10]
            new = [free.pop(0) for _ in range(generator.randrange(1, 30))]
            contexts[row] = shared + new
            ours.forget(torch.tensor(new))
            for token in new:
                plain.slot_of.pop(token, None)
            ids, kept = new[-8:], [True] * len(new[-8:])
        else:
            ids = [free.pop(0) for _ in range(3)]
            accepted = generator.randrange(1, 4)
            kept = [i < accepted for i in range(3)]
            contexts[row] += ids[:accepted]
            free = ids[accepted:] + free
        found = ours.enter(torch.tensor(ids), torch.tensor(kept))
        assert found.tolist() == plain.enter(ids, kept)
        for r, context in contexts.items():
            table[r, : len(context)] = torch.tensor(context)
        rows = torch.tensor(sorted(contexts))
        lengths = torch.tensor([len(contexts[int(r)]) for r in rows])
        slots, visible = ours.view(table, rows, lengths)
        for i, r in enumerate(rows.tolist()):
            wanted = plain.view(contexts[r])
            assert slots[i, : int(visible[i])].tolist() == wanted
            partly_lost += 0 < len(wanted) < min(8, len(contexts[r]))
    assert partly_lost > 20  # the ring really was too small at times


def test_the_drafters_row_is_the_window_then_the_block():
    ours = window()
    ours.enter(torch.arange(1, 11), torch.ones(10, dtype=torch.bool))
    target = torch.arange(100, dtype=torch.int32).repeat(5, 1) + 1
    rows, lengths = torch.tensor([2, 4]), torch.tensor([10, 3])
    slots, visible = ours.view(target, rows, lengths)
    assert visible.tolist() == [8, 3]
    own = torch.zeros(5, 11, dtype=torch.int32)
    ours.write_table(own, rows, slots, visible, 3)
    assert own[2].tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 41, 42, 43]
    assert own[4, :6].tolist() == [1, 2, 3, 44, 45, 46]
    assert ours.block_slots(torch.zeros(6)).tolist() == [41, 42, 43, 44, 45, 46]
    assert ours.size == 40 + 4 * 3


def test_a_narrow_round_lays_out_the_slots_it_writes():
    ours = window()
    ours.enter(torch.arange(1, 4), torch.ones(3, dtype=torch.bool))
    target = torch.arange(100, dtype=torch.int32).repeat(5, 1) + 1
    rows = torch.tensor([2, 4])
    slots, visible = ours.view(target, rows, torch.tensor([3, 3]))
    own = torch.zeros(5, 11, dtype=torch.int32)
    ours.write_table(own, rows, slots, visible, 2)
    written = ours.block_slots(torch.zeros(4)).tolist()
    assert own[2, 3:5].tolist() + own[4, 3:5].tolist() == written == [41, 42, 43, 44]


def test_a_prompt_longer_than_the_ring_keeps_its_share():
    ours = window(ring=20)
    assert ours.per_request(1) == 8
    assert ours.per_request(4) == 5


def test_a_ring_smaller_than_a_window_is_refused():
    with pytest.raises(ValueError, match="cannot hold one window"):
        window(ring=7)


def test_a_round_of_whole_blocks_takes_every_slot_at_most_once():
    """Found as: a ring smaller than a round, whose tokens wrote one slot in no certain order."""
    made = window(ring=9)  # 4 requests, blocks of 3
    kept = torch.ones(12, dtype=torch.bool)
    kept[4] = False
    slots = made.enter(torch.arange(1, 13), kept)
    # The first of the eleven kept would share slots with the last.
    assert slots.tolist() == [0, 0, 3, 4, 0, 5, 6, 7, 8, 9, 1, 2]
    assert made.enter(torch.tensor([20]), torch.ones(1, dtype=torch.bool)).tolist() == [3]
    empty = torch.empty(0, dtype=torch.int64)
    assert made.enter(empty, empty.bool()).tolist() == []
