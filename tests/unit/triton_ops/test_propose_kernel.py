"""The kernels of drafts against their torch references: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_hyperdflash.draft.propose import (
    propose_greedy_op,
    propose_greedy_reference,
    propose_op,
    propose_reference,
)
from tests.unit.triton_ops.gate_help import DEVICE, MANY
from triton_ops import propose_kernel
from triton_ops.gumbel import block_seeds, gumbel_noise

INFINITE, NAN = float("inf"), float("nan")
NO_TOP_K = 1 << 30
# Whether two scores, or a probability and a filter's bound, are closer than sums of another order.
CLOSE_SCORES, CLOSE_BOUND = 1e-5, 1e-6


def on_a_grid(g: torch.Generator, *shape: int, most: int = 8) -> torch.Tensor:
    """Quarters in [-most / 4, most / 4]: their products and sums are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=g) / 4


def arguments(
    bs: int,
    drafts: int,
    candidates: int,
    *,
    vocabulary: int = 300,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    filters: str = "top_k top_p min_p",
    changes: str = "",
    exact: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """The operator's arguments in their order; ``exact`` scores are the same in any order of sums.

    Request 1 of four is greedy if ``filters`` name top_k; every second one has a seed of its own.
    """
    g = torch.Generator().manual_seed(seed)
    request = torch.arange(bs)

    def normal(*shape: int) -> torch.Tensor:
        return on_a_grid(g, *shape) if exact else torch.randn(*shape, generator=g)

    def cycle(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[request % len(values)]

    order = torch.rand(bs, drafts, vocabulary, generator=g).argsort(-1)
    tables = [None, None, None]
    if rank is not None:
        tables = [normal(bs, drafts, rank), normal(vocabulary, rank), normal(vocabulary, rank)]
        tables[1:] = [table.to(dtype) for table in tables[1:]]
    start = torch.randint(0, 1 << 20, (bs, 1), generator=g)
    top_ks = [NO_TOP_K, 1, 3, candidates] if "top_k" in filters else [NO_TOP_K]
    known = {
        "ids": order[..., :candidates].contiguous(),
        "scores": normal(bs, drafts, candidates) * 2,
        **dict(zip(("gates", "predecessor", "successor"), tables, strict=True)),
        "block_tokens": torch.randint(0, vocabulary, (bs, drafts + 1), generator=g),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g),
        "seeded": request % 2 == 1,
        "positions": start + torch.arange(drafts + 1),
        "temperatures": cycle([0.7, 1.0, 1.3, 0.9, 2.0]),
        "top_ks": cycle(top_ks, torch.int32),
        "top_ps": cycle([0.9, 1.0, 0.3, 0.7, 0.99] if "top_p" in filters else [1.0]),
        "min_ps": cycle([0.0, 0.03, 0.2] if "min_p" in filters else [0.0]),
        "draft_temperatures": torch.tensor([1.0, 0.7]),
        "filters": bool(filters),
        "sequential": "sequential" in filters,
        **dict.fromkeys(("counts", "slots", "penalties", "end_ids", "earliest", "bias")),
    }
    return known | adjusting(changes, known["ids"], vocabulary, start[:, 0], normal, g)


def adjusting(
    changes: str,
    ids: torch.Tensor,
    vocabulary: int,
    start: torch.Tensor,
    normal: Callable[..., torch.Tensor],
    g: torch.Generator,
) -> dict[str, torch.Tensor]:
    """The named ones of penalties, end tokens and bias, of requests with candidates ``ids``."""
    known, (bs, drafts, candidates) = {}, ids.shape
    request = torch.arange(bs)
    if "penalties" in changes:
        known["counts"] = torch.randint(0, 2, (bs + 2, vocabulary), generator=g, dtype=torch.int32)
        known["slots"] = torch.randperm(bs + 2, generator=g)[:bs]
        several = [[0.5, 0.0, 1.0], [0.0, 0.7, 1.0], [0, 0, 1.3], [-0.3, 0.1, 0.6], [0.0, 0.0, 1.0]]
        known["penalties"] = torch.tensor(several)[request % 5]
    if "end_ids" in changes:
        known["end_ids"] = ids[:, 0, torch.randperm(candidates)[:3]]
        known["end_ids"][::3, 1:] = -1
        known["earliest"] = start + request % (drafts + 2)
    if "bias" in changes:
        known["bias"] = normal(bs, vocabulary)
        known["bias"][:, ::7] = -INFINITE
    return known


def on_device(known: dict[str, Any]) -> list[Any]:
    return [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in known.values()]


def gaps(values: torch.Tensor) -> torch.Tensor:
    """Differences of neighbours of sorted ``[..., K]``; equal ones are told apart by index."""
    between = -values.nan_to_num().sort(-1, descending=True).values.diff()
    return between.masked_fill(between == 0, INFINITE)


def undecided(known: dict[str, Any], expected: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``[bs, D]`` bool: rows that another order of sums may decide another way."""
    _, q, _, scores = expected
    ids, top_ps, min_ps = known["ids"], known["top_ps"].double(), known["min_ps"].double()
    _, drafts, width = ids.shape
    own = block_seeds(known["seeds"], known["seeded"], known["positions"][:, 0])
    own = own.repeat_interleave(drafts)
    at = known["positions"][:, :drafts].reshape(-1)
    noisy = gumbel_noise(own, at, ids.view(-1, width)).view_as(ids) + q.double().log()
    # Of one-hot rows the noise decides nothing.
    out = (gaps(noisy.clamp(min=-1e6))[..., :1] < CLOSE_SCORES).any(-1)
    out |= (gaps(scores) < CLOSE_SCORES).any(-1)
    if known["filters"] and width > 1:
        t = known["draft_temperatures"][known["seeded"].long()]
        t = (known["temperatures"] * t).masked_fill(t == 0, 1.0).double().view(-1, 1, 1)
        p = (scores / t).softmax(-1).sort(-1, descending=True).values
        before = p.cumsum(-1) - p
        if known["sequential"]:
            top_ks = known["top_ks"].long().view(-1, 1, 1)
            mass = (p * (torch.arange(width) < top_ks)).sum(-1, keepdim=True)
            share = (min_ps.view(-1, 1, 1) > 0) & (top_ks <= width)
            before = before / mass.where(share, 1.0)
        top = top_ps.view(-1, 1, 1)
        out |= (((before - top).abs() < CLOSE_BOUND) & (top < 1)).any(-1)
        least = min_ps.view(-1, 1, 1) * p[..., :1]
        out |= (((p - least).abs() < CLOSE_BOUND) & (least > 0)).any(-1)
    return out


def check(known: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The kernel's results, after the comparison with the reference's."""
    expected = propose_reference(*known.values())
    found = tuple(t.cpu() for t in propose_kernel.launch(*on_device(known)))
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    # Drafts after an undecided one may follow another.
    near = undecided(known, expected).cumsum(1) > 0
    assert near.sum() <= 1 + 0.05 * near.numel()
    (tokens, q, choice, scores), (tokens_, q_, choice_, scores_) = (
        [t[~near] for t in results] for results in (found, expected)
    )
    assert torch.equal(tokens, tokens_)
    assert torch.equal(choice, choice_)
    torch.testing.assert_close(scores, scores_, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(q, q_, rtol=1e-5, atol=1e-6)
    assert (q[q_ > 1e-12] > 0).all()
    assert (q_[q > 1e-12] > 0).all()
    return found


SHAPES = [(1, 1, 1), (3, 2, 3), (2, 9, 5), (9, 1, 64), (4, 3, 64), (3, 2, 100), (MANY, 1, 3)]


@pytest.mark.parametrize(("bs", "drafts", "candidates"), SHAPES)
def test_drafts_without_a_head(bs, drafts, candidates):
    check(arguments(bs, drafts, candidates, exact=False))


@pytest.mark.parametrize(
    ("candidates", "rank", "dtype"),
    [
        *((k, rank, torch.bfloat16) for k, rank in [(1, 1), (3, 5), (64, 5), (7, 256), (64, 256)]),
        *((64, 5, dtype) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_drafts_that_follow_each_other_through_a_head(candidates, rank, dtype):
    known = arguments(5, 3, candidates, rank=rank, dtype=dtype)
    _, _, _, scores = check(known)
    assert torch.equal(scores, propose_reference(*known.values())[3])  # exact sums


def test_a_head_whose_rank_and_candidates_are_the_vocabulary():
    check(arguments(3, 2, 40, vocabulary=40, rank=40))
    check(arguments(3, 2, 5, vocabulary=300, rank=300))


def test_a_head_of_any_weights():
    known = arguments(24, 3, 64, rank=33, exact=False)
    known["gates"] *= 0.3
    check(known)


def test_more_candidates_than_fit_a_tile_of_the_head(monkeypatch):
    monkeypatch.setattr(propose_kernel, "_TILE", 256)
    check(arguments(3, 2, 64, rank=30))


FILTERS = ("top_k", "top_p", "min_p", "sequential")


@pytest.mark.parametrize(
    "filters", [" ".join(c) for n in range(5) for c in itertools.combinations(FILTERS, n)]
)
def test_every_filter_alone_and_together(filters):
    check(arguments(12, 2, 20, filters=filters, exact=False, seed=1))
    check(arguments(12, 1, 20, filters=filters, seed=2))  # many equal candidates


def test_greedy_requests_of_a_batch_without_filters_take_the_largest():
    known = arguments(8, 3, 20, filters="", exact=False)
    known["top_ks"][:4] = 1
    _, q, choice, scores = check(known)
    assert torch.equal(choice[:4], scores[:4].argmax(-1))
    assert (q[:4].amax(-1) == 1).all()
    assert (q[4:].amax(-1) < 1).all()


@pytest.mark.parametrize("candidates", [129, 1000])
def test_many_candidates_are_sorted(candidates):
    filters = "top_p min_p sequential"
    known = arguments(1, 1, candidates, vocabulary=1500, filters=filters, exact=False)
    known["top_ks"][0], known["min_ps"][0], known["top_ps"][0] = 100, 0.01, 0.8
    q = check(known)[1]
    assert 1 < (q > 0).sum() < 100


def test_filters_keep_the_first_of_equal_candidates():
    known = arguments(3, 1, 9, filters="top_k top_p")
    known["scores"].fill_(1.5)
    known["top_ks"], known["top_ps"] = torch.tensor([4, NO_TOP_K, 4]), torch.tensor([1.0, 0.3, 0.3])
    q = check(known)[1][:, 0]
    assert (q > 0).sum(-1).tolist() == [4, 3, 3]
    assert (q[:, :3] > 0).all()


@pytest.mark.parametrize("draft_temperatures", [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("filters", ["", "top_k top_p min_p"])
def test_temperatures_of_every_size(filters, draft_temperatures):
    known = arguments(12, 2, 16, filters=filters, exact=False, seed=3)
    several = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 1.0, 10.0])
    known["temperatures"] = several.repeat(2)
    known["seeded"] = torch.arange(12) >= 6
    known["draft_temperatures"] = torch.tensor(draft_temperatures)
    q = check(known)[1]
    certain = torch.tensor(draft_temperatures)[known["seeded"].long()] == 0
    assert (q[certain].amax(-1) == 1).all()
    check(
        arguments(12, 2, 16, rank=8, filters=filters, seed=4)
        | {
            "temperatures": several.repeat(2),
            "draft_temperatures": torch.tensor(draft_temperatures),
        }
    )


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_that_are_no_distribution_draft_what_argmax_takes():
    rows = [
        [0.0, NAN, 2.0, NAN],
        [NAN, INFINITE, 2.0, 1.0],
        [0.0, INFINITE, INFINITE, 1.0],
        [-INFINITE] * 4,
        [-INFINITE, -INFINITE, 0.5, -INFINITE],
        [NAN] * 4,
        [-1e30] * 4,
        [3e38, -3e38, 3e38, 0.0],
        [0.0, -0.0, 0.0, -0.0],
    ]
    first = [1, 0, 1, 0, 2, 0, None, None, None]
    for t, filters in itertools.product((0.0, 1.0), ("", "top_p min_p")):
        known = arguments(len(rows), 1, 4, filters=filters, seed=5)
        known["scores"] = torch.tensor(rows).unsqueeze(1)
        known["temperatures"][7] = 0.1  # divided by it the scores overflow
        known["draft_temperatures"] = torch.tensor([t, t])
        choice = check(known)[2][:, 0].tolist()
        assert all(b in (None, a) for a, b in zip(choice, first, strict=True))


def test_a_broken_row_leaves_the_drafts_around_it_alone():
    known = arguments(3, 4, 8, rank=3)
    known["scores"][0, 1, 5], known["scores"][1, 2], known["gates"][2, 1] = NAN, -INFINITE, NAN
    check(known)


CHANGES = ("penalties", "end_ids", "bias")


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize(
    "changes", [" ".join(c) for n in range(1, 4) for c in itertools.combinations(CHANGES, n)]
)
def test_every_change_alone_and_together(changes, rank):
    known = arguments(12, 3, 9, rank=rank, changes=changes, seed=6)
    _, _, _, scores = check(known)
    assert torch.equal(scores, propose_reference(*known.values())[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_another_dtype(dtype):
    known = arguments(4, 2, 9, changes="bias")
    check(known | {"bias": known["bias"].to(dtype)})


def test_a_token_that_is_drafted_twice_counts_twice():
    known = arguments(2, 5, 6, changes="penalties", seed=7)
    known["ids"] = known["ids"][:, :1].repeat(1, 5, 1)
    known["scores"].zero_()[..., 2] = 10.0
    known["penalties"] = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.5]])
    known["counts"].zero_()
    tokens, _, _, scores = check(known)
    assert torch.equal(tokens, known["ids"][..., 2])
    assert scores[0, :, 2].tolist() == [10.0, 9.0, 8.0, 7.0, 6.0]
    assert scores[1, :, 2].tolist() == [10.0, 20.0, 20.0, 20.0, 20.0]


def test_end_tokens_are_unlikely_until_the_minimum_is_out():
    known = arguments(1, 4, 3, changes="end_ids", seed=8)
    known["ids"] = known["ids"][:, :1].repeat(1, 4, 1)
    known["end_ids"] = torch.stack([known["ids"][0, 0, 1], torch.tensor(-1)]).unsqueeze(0)
    known["earliest"] = known["positions"][:, 2] + 1
    scores = check(known)[3][0]
    assert (scores[:, 1] < -1e29).tolist() == [True, True, False, False]
    known["ids"] = known["ids"][..., 1:2].contiguous()  # nothing else to draft
    known["scores"] = known["scores"][..., :1].contiguous()
    assert check(known)[1].eq(1).all()


def test_rows_of_wider_tensors():
    known = arguments(4, 2, 5, rank=3)
    wide = torch.randint(0, 300, (4, 7))
    known["block_tokens"], known["positions"] = wide[:, :6], wide[:, 1:7].cumsum(1)
    check(known)


def test_a_program_draws_alone():
    """A request's drafts do not depend on the batch around it."""
    known = arguments(6, 3, 12, rank=4, filters="top_k top_p min_p sequential", changes="penalties")
    whole = check(known)
    by_request = set(known) - {"predecessor", "successor", "draft_temperatures", "counts"}
    for b in range(6):
        one = {
            n: t[b : b + 1] if n in by_request and isinstance(t, torch.Tensor) else t
            for n, t in known.items()
        }
        found = propose_kernel.launch(*on_device(one))
        assert all(torch.equal(f.cpu()[0], w[b]) for f, w in zip(found, whole, strict=True))


GREEDY = ("ids", "scores", "gates", "predecessor", "successor")


def greedy(known: dict[str, Any], anchors: torch.Tensor) -> torch.Tensor:
    """The kernel's drafts of greedy requests, after the comparison with the reference's."""
    several = {name: known[name] for name in GREEDY} | {"anchors": anchors}
    expected = propose_greedy_reference(*several.values())
    found = propose_kernel.launch_greedy(*on_device(several)).cpu()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    return found


@pytest.mark.parametrize("rank", [None, 1, 5, 256])
@pytest.mark.parametrize("candidates", [1, 3, 64, 100])
def test_greedy_drafts(candidates, rank):
    known = arguments(5, 3, candidates, rank=rank, dtype=torch.bfloat16, seed=9)
    greedy(known, known["block_tokens"][:, 0])  # of a stride of four


@pytest.mark.parametrize("bs", [1, 2, MANY])
def test_greedy_drafts_of_every_batch(bs):
    known = arguments(bs, 1, 3, rank=2, seed=10)
    greedy(known, known["block_tokens"][:, 0].contiguous())


def test_greedy_drafts_of_equal_and_broken_scores():
    rows = [[1.0, 2.0, 2.0], [-INFINITE] * 3, [0.0, NAN, 3.0], [INFINITE, 0.0, INFINITE]]
    known = arguments(4, 1, 3, seed=11) | {"scores": torch.tensor(rows).unsqueeze(1)}
    found = greedy(known, known["block_tokens"][:, 0])
    assert found[0, 0] == known["ids"][0, 0, 1:].min()
    head = arguments(4, 1, 3, rank=2, seed=11)
    head["gates"].zero_()
    found = greedy(head | {"scores": known["scores"]}, known["block_tokens"][:, 0])
    choice = (head["ids"][:, 0] == found).int().argmax(-1)
    assert choice.tolist() == [1, 0, 1, 0]


def test_no_requests_and_no_drafts_are_nothing_to_do():
    for bs, drafts in ((0, 3), (2, 0)):
        known = arguments(2, 3, 5)
        known |= {n: known[n][:bs, :drafts] for n in ("ids", "scores")}
        tokens, q, choice, scores = propose_kernel.launch(*known.values())
        assert tokens.shape == choice.shape == (bs, drafts)
        assert q.shape == scores.shape == (bs, drafts, 5)
        several = [known[name] for name in GREEDY]
        assert propose_kernel.launch_greedy(*several, known["seeds"]).shape == (bs, drafts)


def test_the_operators_fake_and_dispatch():
    for rank, changes in ((None, ""), (3, "penalties end_ids bias")):
        known = arguments(3, 2, 5, rank=rank, changes=changes)
        torch.library.opcheck(propose_op.default, tuple(known.values()))
        several = (*(known[name] for name in GREEDY), known["block_tokens"][:, 0])
        torch.library.opcheck(propose_greedy_op.default, several)
