"""The ring of draft K/V slots, against a plain Python bookkeeping of who wrote what last."""

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving.draft_kv.draft_kv import WindowedDraftKV
from sglang_hyperdflash.serving.draft_kv.window import DraftWindow

RING, WINDOW = 40, 8


def window(ring: int = RING) -> DraftWindow:
    return DraftWindow(tokens=400, ring=ring, window=WINDOW, block=3, batch=4, device="cpu")


class Plain:
    """How many tokens had entered before each one did; the last ``RING`` of them are there."""

    def __init__(self) -> None:
        self.entered, self.count = dict[int, int](), 0

    def forget(self, tokens: list[int]) -> None:
        for token in tokens:
            self.entered.pop(token, None)

    def enter(self, tokens: list[int], kept: list[bool]) -> list[int]:
        self.forget(tokens)
        for token in (token for token, keep in zip(tokens, kept, strict=True) if keep):
            self.entered[token] = self.count
            self.count += 1
        return [self.entered[t] % RING + 1 if t in self.entered else 0 for t in tokens]

    def view(self, context: list[int]) -> list[int]:
        """Slots of the longest live suffix of at most W tokens, oldest first."""
        found: list[int] = []
        for token in context[: -WINDOW - 1 : -1]:
            entered = self.entered.get(token, -1)
            if entered < max(self.count - RING, 0):
                break
            found.insert(0, entered % RING + 1)
        return found


def test_random_traffic_matches_plain_bookkeeping():
    draw, ours, plain = random.Random(0), window(), Plain()
    table = torch.zeros(5, 100, dtype=torch.int32)
    contexts: dict[int, list[int]] = {}
    free, partly_lost = list(range(1, 400)), 0
    draw.shuffle(free)
    for _ in range(400):
        row = draw.randrange(1, 5)
        if row not in contexts or len(contexts[row]) > 80:
            free += contexts.pop(row, [])  # ids are given to other tokens later
            shared = draw.choice([[], *contexts.values()])[:10]
            new = [free.pop(0) for _ in range(draw.randrange(1, 30))]
            contexts[row] = shared + new
            ours.forget(torch.tensor(new))
            plain.forget(new)
            ids = new[-WINDOW:]
            kept = [True] * len(ids)
        else:
            ids, accepted = [free.pop(0) for _ in range(3)], draw.randrange(1, 4)
            kept = [i < accepted for i in range(3)]
            contexts[row] += ids[:accepted]
            free = ids[accepted:] + free
        found = ours.enter(torch.tensor(ids), torch.tensor(kept))
        assert found.tolist() == plain.enter(ids, kept)
        for r, context in contexts.items():
            table[r, : len(context)] = torch.tensor(context)
        lengths = torch.tensor([len(context) for context in contexts.values()])
        slots, visible = ours.view(table, torch.tensor(list(contexts)), lengths)
        for i, context in enumerate(contexts.values()):
            wanted = plain.view(context)
            assert slots[i, : int(visible[i])].tolist() == wanted
            partly_lost += 0 < len(wanted) < min(WINDOW, len(context))
    assert partly_lost > 20, "the ring was never too small"


def test_one_slot_is_never_given_twice_in_a_round_and_prompts_share_the_ring():
    """Else chance would decide whose K/V it holds."""
    made = window(ring=9)  # 4 requests, blocks of 3
    kept = torch.ones(12, dtype=torch.bool)
    kept[4] = False
    # The first of the eleven kept would share slots with the last.
    slots = made.enter(torch.arange(1, 13), kept)
    assert slots.tolist() == [0, 0, 3, 4, 0, 5, 6, 7, 8, 9, 1, 2]
    assert made.enter(torch.tensor([20]), torch.ones(1, dtype=torch.bool)).tolist() == [3]
    empty = torch.empty(0, dtype=torch.int64)
    assert made.enter(empty, empty.bool()).tolist() == []
    assert [window(ring=20).per_request(n) for n in (1, 4)] == [8, 5]
    with pytest.raises(ValueError):
        window(ring=7)


def test_tokens_that_another_node_or_the_host_computed_are_forgotten():
    """All of a handed-over request's, the restored ones of a prefill's prefix; no others."""
    ids = torch.arange(1, 13)
    pools = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=ids.view(1, 12).int()))
    kv = WindowedDraftKV(SimpleNamespace(target=pools), 0.1)
    request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0, kv_committed_len=7))
    request.prefix_len, request.host_loaded_length = 6, 4

    def known(prefill: bool, restored: bool) -> list[bool]:
        kv.window = window(16)
        kv.window.enter(ids, torch.ones(12, dtype=torch.bool))
        request.needs_host_load_back = lambda: restored
        kv.arrive(request, prefill)
        return (kv.window.slot_of[ids] >= 0).tolist()

    assert known(False, False) == [False] * 7 + [True] * 5
    assert known(True, True) == [True] * 2 + [False] * 4 + [True] * 6
    assert known(True, False) == [True] * 12
