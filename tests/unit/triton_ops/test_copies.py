"""Copies against a search that a person would write, and the kernel against its reference."""

import pytest
import torch

from tests.unit.triton_ops.gate_help import DEVICE
from triton_ops import copy_kernel
from triton_ops.copies import KINDS, LONGEST, SHORTEST, copy_drafts_reference, copy_weights, parts

VOCABULARY = 50


def searched(known: list[int], drafts: int) -> tuple[list[int], int]:
    """The copies after the tokens of a request, and the length of their match."""
    end = len(known) - 1
    best, start = 0, None
    for here in range(end):
        length = 0
        while length < min(LONGEST, here + 1) and known[here - length] == known[end - length] >= 0:
            length += 1
        if length >= SHORTEST and length >= best:
            best, start = length, here
    if start is None:
        return [-1] * drafts, 0
    extended = list(known)
    for k in range(drafts):
        extended.append(extended[start + 1 + k])
    return extended[end + 1 :], best


class Requests:
    """Requests that commit random tokens, or what they were to copy, round by round."""

    def __init__(self, bs: int, size: int, drafts: int, alphabet: int, start: int) -> None:
        self.g = torch.Generator().manual_seed(bs + size + alphabet)
        self.size, self.drafts, self.alphabet = size, drafts, alphabet
        self.known = [self.draw(start + b) for b in range(bs)]
        self.slots = torch.randperm(bs + 3, generator=self.g)[:bs]
        self.history = torch.full((bs + 3, size), -1, dtype=torch.int32)
        for slot, known in zip(self.slots.tolist(), self.known, strict=True):
            for p, token in enumerate(known):
                self.history[slot, p % size] = token
        self.rows = torch.full((bs + 2, 2 * drafts + 1), -1)
        self.rows[:, -1] = 0
        self.copies, self.firsts, self.kinds = parts(self.rows)
        self.counts = torch.zeros(2, KINDS, 2, dtype=torch.int32)
        self.top_ks = torch.where(torch.arange(bs) % 2 == 0, 1, 1 << 30).int()
        self.judged = torch.zeros_like(self.counts)

    def draw(self, n: int) -> list[int]:
        return torch.randint(0, self.alphabet, (n,), generator=self.g).tolist()

    def round(self, step, width: int) -> None:
        """Commit up to ``width`` tokens of each request by ``step``, an operator's function."""
        bs = len(self.known)
        before = self.copies[:bs].tolist()
        tokens, lengths = [], []
        for b, copies in enumerate(before):
            n = 1 + int(torch.randint(0, width, (), generator=self.g))
            right = int(torch.randint(0, width + 1, (), generator=self.g))
            row = [c for c in copies[:right] if c >= 0]
            tokens.append((row + self.draw(width))[:width])
            lengths.append(n)
            self.firsts[b] = torch.tensor(self.draw(self.drafts))
            self._judge(b, copies[: width - 1], tokens[-1][:n])
        positions = torch.tensor([len(known) - 1 for known in self.known])
        drafts = torch.tensor(tokens)[:, : width - 1].clone()
        if width > 1:
            drafts[::3, -1] += 1
        arguments = self.history, self.slots, positions, torch.tensor(tokens)
        arguments += torch.tensor(lengths, dtype=torch.int32), drafts, self.top_ks
        arguments += self.rows[:bs], self.counts, VOCABULARY
        for known, row, n in zip(self.known, tokens, lengths, strict=True):
            known += [t if t < VOCABULARY else -1 for t in row[:n]]
        copied = [
            next((k for k, (a, c) in enumerate(zip(row, copies, strict=False)) if a != c), len(row))
            for row, copies in zip(drafts.tolist(), before, strict=True)
        ]
        assert step(arguments).tolist() == [
            list(pair) for pair in zip(self.kinds[:bs].tolist(), copied, strict=True)
        ]

    def _judge(self, b: int, copies: list[int], committed: list[int]) -> None:
        judged = self.judged[int(self.top_ks[b] > 1), int(self.kinds[b])]
        for copy, token, first in zip(copies, committed, self.firsts[b].tolist(), strict=False):
            if copy < 0:
                break
            if copy != first:
                judged[0] += copy == token
                judged[1] += first == token
            if copy != token:
                break


def copied_by_both(given: tuple) -> torch.Tensor:
    others = [t.to(DEVICE, copy=True) if isinstance(t, torch.Tensor) else t for t in given]
    result = copy_drafts_reference(*given)
    assert torch.equal(copy_kernel.launch(*others).cpu(), result)
    for i in (0, 7, 8):
        assert torch.equal(given[i], others[i].cpu())
    return result


# Requests, columns of the history, drafts, different tokens, tokens of the shortest prompt.
@pytest.mark.parametrize(
    "sizes", [(1, 64, 6, 2, 3), (4, 64, 6, 3, 150), (5, 100, 1, 2, 40), (3, 2500, 9, 6, 2400)]
)
def test_copies_follow_the_latest_of_the_longest_matches(sizes):
    requests = Requests(*sizes)
    for turn in range(12):
        requests.round(copied_by_both, (sizes[2] + 1, 1, 2)[turn % 3])
        for b, known in enumerate(requests.known):
            expected, length = searched(known[-sizes[1] :], sizes[2])
            assert requests.copies[b].tolist() == expected
            assert int(requests.kinds[b]) == (length + 1) // 4
    assert torch.equal(requests.counts, requests.judged)
    assert (requests.judged.sum((0, 1)) > 0).all()


def test_what_is_no_token_is_neither_matched_nor_copied():
    requests = Requests(1, 64, 3, 2, 0)
    requests.known[0] = [1, 2, 3, 4, VOCABULARY, 7, 1, 2]
    requests.history[requests.slots[0], :8] = torch.tensor([1, 2, 3, 4, -1, 7, 1, 2]).int()
    arguments = requests.history, requests.slots, torch.tensor([7]), torch.tensor([[3]])
    arguments += torch.ones(1, dtype=torch.int32), torch.empty(1, 0, dtype=torch.int64)
    state = requests.rows[:1], requests.counts, VOCABULARY
    copy_drafts_reference(*arguments, requests.top_ks, *state)
    assert requests.copies[0].tolist() == [4, -1, 7]


def test_copies_are_drafted_until_the_drafter_is_right_instead():
    rows, top_ks = torch.zeros(4, 3, dtype=torch.int64), torch.tensor([1, 1, 1, 5])
    rows[:, 2] = torch.tensor([0, 1, 4, 4])
    counts = torch.zeros(2, KINDS, 2, dtype=torch.int32)
    assert [w > 0.5 for w in copy_weights(rows, counts, top_ks).tolist()] == [False, *[True] * 3]
    counts[0, 0], counts[0, 1] = 9, torch.tensor([7, 1])
    counts[0, 4], counts[1, 4] = torch.tensor([8, 1]), torch.tensor([0, 1])
    weights = copy_weights(rows, counts, top_ks)
    assert weights[0] == 0 < weights[3] < weights[1] == 0.5 < weights[2]
