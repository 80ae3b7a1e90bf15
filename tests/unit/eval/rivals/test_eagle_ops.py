"""The torch forms of EAGLE's chain helpers: exact distributions, and plain loops."""

import pytest
import torch

from eval.rivals import eagle_ops
from tests.unit.statistics_help import chi_square_p_value

BS, N, V = 3, 5, 11


def chain_buffers(bs: int = BS, n: int = N):
    """``predicts``, ``accept_index``, ``accept_token_num`` and the rows of a chain."""
    index = torch.full((bs, n), -1, dtype=torch.int32)
    rows = torch.arange(bs * n).view(bs, n)
    return torch.zeros(bs * n, dtype=torch.int32), index, torch.empty(bs, dtype=torch.int32), rows


def test_greedy_verification_accepts_the_longest_right_prefix():
    candidates = torch.arange(BS * N).view(BS, N)
    target = candidates.roll(-1, 1)
    for row, right in enumerate((0, 2, N - 1)):
        target[row, right] = 99  # a wrong draft, or the token after the last one
    predicts, index, count, rows = chain_buffers()
    eagle_ops.verify_chain_greedy(predicts, index, count, candidates, rows, rows, rows, target)
    assert count.tolist() == [0, 2, N - 1]
    for row, accepted in enumerate(count.tolist()):
        kept = list(range(row * N, row * N + accepted + 1))
        assert index[row].tolist() == kept + [-1] * (N - len(kept))
    assert predicts.view(BS, N).tolist() == target.tolist()


@pytest.mark.parametrize("kept", [V, 5], ids=["whole", "filtered"])
def test_sampled_verification_emits_the_targets_distribution(kept):
    """Of the first token, and of each later one after accepted drafts; coin by coin."""
    bs, n, generator = 300_000, 4, torch.Generator().manual_seed(kept)
    probs = (torch.randn(n, V, generator=generator) * 1.5).softmax(-1)
    probs = probs * (probs >= probs.sort(-1, descending=True).values[:, kept - 1 : kept])
    probs = probs / probs.sum(-1, keepdim=True)
    # Likely drafts, so that every length up to a full block occurs often.
    chain = torch.cat([torch.tensor([0]), probs[:-1].argmax(-1)])
    coins, last = torch.rand(bs, n, generator=generator), torch.rand(bs, generator=generator)
    predicts, index, count, rows = chain_buffers(bs, n)
    target = probs.expand(bs, n, V)
    candidates = chain.expand(bs, n)
    eagle_ops.verify_chain_sampled(
        predicts, index, count, candidates, rows, rows, rows, coins, last, target, target * 0
    )
    likely = probs[range(n - 1), chain[1:]]
    accepted = (coins[:, :-1] < likely).int().cumprod(1).sum(1)
    assert torch.equal(count.long(), accepted)
    kept = torch.arange(n) <= accepted[:, None]
    assert torch.equal(index.long(), torch.where(kept, rows, -1))
    emitted, values = predicts.view(bs, n), []
    for k in range(n):
        assert (emitted[accepted > k, k] == (chain[k + 1] if k < n - 1 else 0)).all()
        values.append(chi_square_p_value(emitted[accepted >= k, k], probs[k]))
    assert min(values) > 1e-4, values


def test_chances_of_nought_and_one_and_broken_rows():
    impossible, certain = torch.eye(3)[1].expand(1, 2, 3), torch.eye(3)[[2, 1]].unsqueeze(0)
    chain, nought, most = torch.tensor([[0, 2]]), torch.zeros(1, 1), torch.tensor([[1.0 - 2**-24]])
    for probs, coin, accepted in ((impossible, nought, 0), (certain, most, 1)):
        length, bonus = eagle_ops.accept_sampled(chain, probs, coin, torch.zeros(1))
        assert (length.tolist(), bonus.tolist()) == ([accepted], [1])
    weights = torch.tensor([[1.0, float("nan"), 1.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    assert eagle_ops.draw(weights, torch.tensor([0.1, 0.5, 1.0])).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="threshold"):
        eagle_ops.verify_chain_sampled(*[None] * 11, threshold_acc=0.5)


def test_positions_links_and_slots():
    seq_lens = torch.tensor([4, 7])
    positions, links = torch.zeros(6, dtype=torch.long), torch.zeros(3, 2, 3, dtype=torch.long)
    eagle_ops.build_chain(None, None, seq_lens, None, positions, *links, 1, 2, 3, None)
    assert positions.tolist() == [4, 5, 6, 7, 8, 9]
    assert links[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert links[1].tolist() == [[1, 2, -1]] * 2 and links[2].tolist() == [[-1] * 3] * 2
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
    parts = eagle_ops.gather_spec_extras(torch.tensor([3, 1]), rows, rows, rows[:, 0], None)
    assert parts[0].tolist() == [[6, 7], [2, 3]] and parts[2].tolist() == [6, 2]
    assert parts[3] is None


def test_renormalisations_keep_what_they_say():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    expected = torch.tensor([[4 / 7, 3 / 7, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(eagle_ops.top_k_renorm(probs, torch.tensor([2, 4])), expected)
    torch.testing.assert_close(eagle_ops.top_p_renorm(probs, torch.tensor([0.65, 1.0])), expected)
