"""The torch forms of EAGLE's chain helpers, against plain loops."""

from __future__ import annotations

import pytest
import torch

from cpu_engine.rivals import eagle_ops
from tests.unit.statistics_help import chi_square_p_value

BS, N, V = 3, 5, 11


@pytest.fixture
def chain():
    g = torch.Generator().manual_seed(0)
    candidates = torch.randint(V, (BS, N), generator=g)
    target = torch.randint(V, (BS, N), generator=g)
    for row, right in enumerate((0, 2, N - 1)):
        target[row, :right] = candidates[row, 1 : right + 1]
        if right < N - 1:
            target[row, right] = (candidates[row, right + 1] + 1) % V
    return candidates, target


def buffers():
    index = torch.full((BS, N), -1, dtype=torch.int32)
    rows = torch.arange(BS * N).view(BS, N)
    return torch.zeros(BS * N, dtype=torch.int32), index, torch.empty(BS, dtype=torch.int32), rows


def test_greedy_verification_accepts_the_longest_right_prefix(chain):
    candidates, target = chain
    predicts, index, count, rows = buffers()
    eagle_ops.verify_chain_greedy(predicts, index, count, candidates, rows, rows, rows, target)
    assert count.tolist() == [0, 2, N - 1]
    for row, accepted in enumerate(count.tolist()):
        assert index[row].tolist() == [*range(row * N, row * N + accepted + 1)] + [-1] * (
            N - 1 - accepted
        )
    assert predicts.view(BS, N).tolist() == target.tolist()


def test_sampled_verification_is_the_rule_coin_by_coin(chain):
    candidates, _ = chain
    g = torch.Generator().manual_seed(1)
    for _ in range(50):
        probs = torch.rand(BS, N, V, generator=g).softmax(-1)
        probs[0, 0, candidates[0, 1]] = 30.0  # some drafts are accepted
        probs = probs / probs.sum(-1, keepdim=True)
        coins, last = torch.rand(BS, N, generator=g), torch.rand(BS, generator=g)
        predicts, index, count, rows = buffers()
        eagle_ops.verify_chain_sampled(
            predicts, index, count, candidates, rows, rows, rows, coins, last, probs, probs * 0
        )
        for row in range(BS):
            at = 0
            while at < N - 1 and coins[row, at] < probs[row, at, candidates[row, at + 1]]:
                assert predicts[row * N + at] == candidates[row, at + 1]
                at += 1
            assert count[row] == at and index[row, at] == row * N + at
            assert at == N - 1 or predicts[row * N + at] != candidates[row, at + 1]


def test_sampled_verification_emits_the_target_s_distribution():
    """One draft, many rounds: the first token of each is distributed as the target says."""
    g = torch.Generator().manual_seed(2)
    row = torch.rand(V, generator=g).softmax(-1)
    bs = 20_000
    candidates = torch.zeros(bs, 2, dtype=torch.long)
    candidates[:, 1] = row.argmax()
    predicts = torch.zeros(bs * 2, dtype=torch.int32)
    index = torch.full((bs, 2), -1, dtype=torch.int32)
    rows = torch.arange(bs * 2).view(bs, 2)
    count = torch.empty(bs, dtype=torch.int32)
    coins, last = torch.rand(bs, 2, generator=g), torch.rand(bs, generator=g)
    probs = row.expand(bs, 2, V)
    eagle_ops.verify_chain_sampled(
        predicts, index, count, candidates, rows, rows, rows, coins, last, probs, probs * 0
    )
    assert chi_square_p_value(predicts.view(bs, 2)[:, 0], row) > 1e-3


def test_a_threshold_that_would_bend_the_distribution_is_refused():
    with pytest.raises(ValueError, match=r"thresholds must be 1\.0"):
        eagle_ops.verify_chain_sampled(*[None] * 11, threshold_acc=0.5)


def test_positions_links_and_slots():
    seq_lens = torch.tensor([4, 7])
    positions, links = torch.zeros(6, dtype=torch.long), torch.zeros(3, 2, 3, dtype=torch.long)
    eagle_ops.build_chain(None, None, seq_lens, None, positions, *links, 1, 2, 3, None)
    assert positions.tolist() == [4, 5, 6, 7, 8, 9]
    assert links.tolist() == [
        [[0, 1, 2], [3, 4, 5]],
        [[1, 2, -1], [1, 2, -1]],
        [[-1] * 3, [-1] * 3],
    ]
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    slots = torch.zeros(6, dtype=torch.long)
    eagle_ops.assign_draft_cache_locs(torch.tensor([2, 0]), table, seq_lens, slots, 1, 3)
    assert slots.tolist() == [24, 25, 26, 7, 8, 9]


def test_bonus_tokens_and_gathered_rows():
    tokens, lens = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([1, 3])
    bonus = torch.zeros(2, dtype=torch.long)
    eagle_ops.fill_bonus_tokens(tokens, lens, bonus, 3, 2)
    assert bonus.tolist() == [5, 10]
    rows = torch.arange(8).view(4, 2)
    found = eagle_ops.gather_spec_extras(torch.tensor([3, 1]), rows, rows, rows[:, 0], None)
    assert found[0].tolist() == [[6, 7], [2, 3]] and found[2].tolist() == [6, 2]
    assert found[3] is None


def test_renormalisations_keep_what_they_say():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    top_k = eagle_ops.top_k_renorm(probs, torch.tensor([2, 4]))
    torch.testing.assert_close(top_k[0], torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(top_k[1], probs[1])
    top_p = eagle_ops.top_p_renorm(probs, torch.tensor([0.65, 1.0]))
    torch.testing.assert_close(top_p[0], torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(top_p[1], probs[1])
