"""The kernels of drafts against their torch references: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sglang_hyperdflash.draft.propose import propose_greedy_reference, propose_reference
from tests.unit.triton_ops.gate_help import DEVICE, MANY
from triton_ops import propose_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INFINITE, NAN = float("inf"), float("nan")
NO_TOP_K = 1 << 30
ADJUSTING = ("counts", "slots", "penalties", "end_ids", "earliest", "bias")
GREEDY = ("ids", "scores", "gates", "predecessor", "successor")


def arguments(
    bs: int,
    drafts: int,
    candidates: int,
    *,
    vocabulary: int = 300,
    rank: int | None = None,
    dtype: torch.dtype = FP32,
    filters: str = "top_k top_p min_p",
    changes: str = "",
    exact: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """The operator's arguments in their order.

    Request 1 of four is greedy if ``filters`` name top_k; every second one has a seed of its own.

    Args:
        exact: scores are quarters, the same in any order of sums; changes: of ``ADJUSTING``.
    """
    g = torch.Generator().manual_seed(seed)
    request = torch.arange(bs)

    def normal(*shape: int) -> torch.Tensor:
        if exact:
            return torch.randint(-8, 9, shape, generator=g) / 4
        return torch.randn(*shape, generator=g)

    def cycle(values: list[float], dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[request % len(values)]

    order = torch.rand(bs, drafts, vocabulary, generator=g).argsort(-1)
    ids = order[..., :candidates].contiguous()
    gates, *tables = None, None, None
    if rank is not None:
        gates = normal(bs, drafts, rank)
        tables = [normal(vocabulary, rank).to(dtype) for _ in range(2)]
    start = torch.randint(0, 1 << 20, (bs, 1), generator=g)
    top_ks = [NO_TOP_K, 1, 3, candidates] if "top_k" in filters else [NO_TOP_K]
    known = {"ids": ids, "scores": normal(bs, drafts, candidates) * 2, "gates": gates}
    known |= {"predecessor": tables[0], "successor": tables[1]}
    known |= {
        "block_tokens": torch.randint(0, vocabulary, (bs, drafts + 1), generator=g),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g),
        "seeded": request % 2 == 1,
        "positions": start + torch.arange(drafts + 1),
        "temperatures": cycle([0.7, 1.0, 1.3, 0.9, 2.0]),
        "top_ks": cycle(top_ks, torch.int32),
        "top_ps": cycle([0.9, 1.0, 0.3, 0.7, 0.99] if "top_p" in filters else [1.0]),
        "min_ps": cycle([0.0, 0.03, 0.2] if "min_p" in filters else [0.0]),
        "draft_temperatures": torch.tensor([1.0, 0.7]),
    }
    known |= {"filters": bool(filters), "sequential": "sequential" in filters}
    known |= dict.fromkeys(ADJUSTING)
    if "penalties" in changes:
        known["counts"] = torch.randint(0, 2, (bs + 2, vocabulary), generator=g, dtype=torch.int32)
        known["slots"] = torch.randperm(bs + 2, generator=g)[:bs]
        several = [[0.5, 0.0, 1.0], [0.0, 0.7, 1.0], [0, 0, 1.3], [-0.3, 0.1, 0.6], [0.0, 0.0, 1.0]]
        known["penalties"] = torch.tensor(several)[request % 5]
    if "end_ids" in changes:
        known["end_ids"] = ids[:, 0, torch.randperm(candidates, generator=g)[:3]]
        known["end_ids"][::3, 1:] = -1
        known["earliest"] = start[:, 0] + request % (drafts + 2)
    if "bias" in changes:
        known["bias"] = normal(bs, vocabulary)
        known["bias"][:, ::7] = -INFINITE
    return known


def on_device(known: dict[str, Any]) -> list[Any]:
    return [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in known.values()]


def check(known: dict[str, Any], exact: bool = False) -> tuple[torch.Tensor, ...]:
    """The kernel's results, after the comparison with the reference's; bits of ``exact`` scores.

    Sums run in another order. Of these seeds no two scores, nor a sum and a filter's bound, are so
    near that it matters.
    """
    expected = propose_reference(*known.values())
    results = tuple(t.cpu() for t in propose_kernel.launch(*on_device(known)))
    for one, other in zip(results, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    (tokens, q, choice, scores), (tokens_, q_, choice_, scores_) = results, expected
    assert torch.equal(tokens, tokens_) and torch.equal(choice, choice_)
    close = 0 if exact else 1e-5
    torch.testing.assert_close(scores, scores_, rtol=close, atol=close, equal_nan=True)
    torch.testing.assert_close(q, q_, rtol=1e-5, atol=1e-6)
    assert (q[q_ > 1e-12] > 0).all() and (q_[q > 1e-12] > 0).all()
    return results


def greedy(known: dict[str, Any], anchors: torch.Tensor) -> torch.Tensor:
    """The kernel's drafts of greedy requests, after the comparison with the reference's."""
    several = {name: known[name] for name in GREEDY} | {"anchors": anchors}
    expected = propose_greedy_reference(*several.values())
    drafts = propose_kernel.launch_greedy(*on_device(several)).cpu()
    assert drafts.dtype == expected.dtype
    assert torch.equal(drafts, expected)
    return drafts


@pytest.mark.parametrize(
    "sizes",  # requests, drafts, candidates
    [(1, 1, 1), (3, 2, 3), (1, 9, 5), (4, 1, 64), (2, 2, 100), (MANY, 1, 2)],
)
def test_drafts_without_a_head(sizes):
    known = arguments(*sizes, exact=False)
    check(known)
    greedy(known, known["block_tokens"][:, 0])  # of a stride of its own


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("candidates", "rank"), [(1, 1), (3, 5), (7, 256), (40, 40)])
def test_drafts_that_follow_each_other_through_a_head(candidates, rank, dtype):
    known = arguments(3, 2, candidates, rank=rank, vocabulary=40, dtype=dtype)
    check(known, exact=True)
    greedy(known, known["block_tokens"][:, 0].contiguous())


def test_a_head_of_any_weights_and_one_that_is_read_in_pieces(monkeypatch):
    known = arguments(12, 3, 20, rank=33, exact=False)
    known["gates"] *= 0.3
    check(known)
    monkeypatch.setattr(propose_kernel, "_TILE", 256)
    check(arguments(2, 2, 64, rank=30))


@pytest.mark.parametrize("filters", ["", "plain", "sequential"])
@pytest.mark.parametrize("exact", [False, True])  # of exact scores many candidates are equal
def test_every_filter_with_every_other(filters, exact):
    grid = itertools.product((NO_TOP_K, 1, 3, 20), (1.0, 0.3, 0.9), (0.0, 0.2))
    top_ks, top_ps, min_ps = map(torch.tensor, zip(*grid, strict=True))
    if filters:
        limits = {"top_ks": top_ks.int(), "top_ps": top_ps, "min_ps": min_ps}
    else:  # a greedy request alone takes its largest
        limits = {"top_ks": torch.where(torch.arange(24) < 2, 1, NO_TOP_K).int()}
    known = arguments(24, 1, 20, filters=filters, exact=exact, seed=1) | limits
    if exact:
        known["scores"][12:] = 1.5
    _, q, choice, scores = check(known)
    greedies = known["top_ks"] == 1
    assert torch.equal(choice[greedies], scores[greedies].argmax(-1))
    assert (q[greedies].amax(-1) == 1).all()
    assert filters or (q[2:].amax(-1) < 1).all()


def test_many_candidates_are_sorted():
    filters = "top_p min_p sequential"
    known = arguments(1, 1, 600, vocabulary=1500, filters=filters, exact=False)
    known["top_ks"][0], known["min_ps"][0], known["top_ps"][0] = 100, 0.01, 0.8
    q = check(known)[1]
    assert 1 < (q > 0).sum() < 100


@pytest.mark.parametrize(
    ("draft_temperatures", "filters", "rank"),
    [((0.0, 0.0), "", None), ((0.5, 0.0), "top_p min_p", None), ((0.0, 1.0), "", 3)],
)
def test_temperatures_of_every_size(draft_temperatures, filters, rank):
    known = arguments(12, 1, 16, filters=filters, rank=rank, exact=rank is not None, seed=3)
    known["temperatures"] = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 1.0, 10.0]).repeat(2)
    known["seeded"] = torch.arange(12) >= 6
    known["draft_temperatures"] = torch.tensor(draft_temperatures)
    q = check(known)[1]
    certain = known["draft_temperatures"][known["seeded"].long()] == 0
    assert (q[certain].amax(-1) == 1).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("filters", ["", "top_p min_p"])
def test_rows_that_are_no_distribution_draft_what_argmax_takes(filters):
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
    first = [1, 0, 1, 0, 2, 0, None, None, None] * 2
    known = arguments(18, 1, 4, filters=filters, seed=5)
    known["scores"] = torch.tensor(rows * 2).unsqueeze(1)
    known["temperatures"][[7, 16]] = 0.1  # divided by it the scores overflow
    known["seeded"] = torch.arange(18) < 9
    known["draft_temperatures"] = torch.tensor([0.0, 1.0])
    choice = check(known)[2][:, 0].tolist()
    assert all(b in (None, a) for a, b in zip(choice, first, strict=True))


def test_a_broken_row_leaves_the_drafts_around_it_alone():
    known = arguments(3, 4, 8, rank=3)
    known["scores"][0, 1, 5], known["scores"][1, 2], known["gates"][2, 1] = NAN, -INFINITE, NAN
    check(known)


@pytest.mark.parametrize(
    ("changes", "rank", "bias_dtype"),
    [
        ("penalties", None, FP32),
        ("end_ids", None, FP32),
        ("bias", 4, BF16),
        ("bias", None, FP16),
        ("penalties end_ids bias", 4, FP32),
    ],
)
def test_every_change_alone_and_together(changes, rank, bias_dtype):
    known = arguments(6, 3, 9, rank=rank, changes=changes, seed=6)
    # Of all but one request all drafts have the same candidates, one likely: it comes again.
    known["ids"][:5] = known["ids"][:5, :1]
    known["scores"][:5, :, 2] = 20.0
    if known["bias"] is not None:
        known["bias"] = known["bias"].to(bias_dtype)
    check(known, exact=True)
    for name in ("ids", "scores"):  # an end token may be all there is
        known[name] = known[name][..., :1].contiguous()
    check(known, exact=True)


def test_a_program_draws_alone_from_rows_that_lie_anywhere():
    """A request's drafts do not depend on the batch around it."""
    known = arguments(3, 3, 12, rank=4, filters="top_k top_p min_p sequential", changes="penalties")
    wide = torch.randint(0, 300, (3, 6), generator=torch.Generator().manual_seed(0))
    known["block_tokens"], known["positions"] = wide[:, :5], wide[:, 1:6].cumsum(1)
    whole = check(known)
    by_request = set(known) - {"predecessor", "successor", "draft_temperatures", "counts"}
    for b in range(3):
        one = {
            n: t[b : b + 1] if n in by_request and isinstance(t, torch.Tensor) else t
            for n, t in known.items()
        }
        alone = propose_kernel.launch(*on_device(one))
        assert all(torch.equal(f.cpu()[0], w[b]) for f, w in zip(alone, whole, strict=True))


def test_greedy_drafts_of_equal_and_broken_scores():
    rows = [[1.0, 2.0, 2.0], [-INFINITE] * 3, [0.0, NAN, 3.0], [INFINITE, 0.0, INFINITE]]
    scores = torch.tensor(rows).unsqueeze(1)
    known = arguments(4, 1, 3, seed=11) | {"scores": scores}
    drafts = greedy(known, known["block_tokens"][:, 0])
    assert drafts[0, 0] == known["ids"][0, 0, 1:].min()
    head = arguments(4, 1, 3, rank=2, seed=11) | {"scores": scores}
    head["gates"].zero_()
    drafts = greedy(head, known["block_tokens"][:, 0])
    choice = (head["ids"][:, 0] == drafts).int().argmax(-1)
    assert choice.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(("bs", "drafts"), [(0, 3), (2, 0)])
def test_no_requests_and_no_drafts_are_nothing_to_do(bs, drafts):
    known = arguments(2, 3, 5)
    known |= {n: known[n][:bs, :drafts] for n in ("ids", "scores")}
    tokens, q, choice, scores = propose_kernel.launch(*known.values())
    assert tokens.shape == choice.shape == (bs, drafts)
    assert q.shape == scores.shape == (bs, drafts, 5)
    several = [known[name] for name in GREEDY]
    assert propose_kernel.launch_greedy(*several, known["seeds"]).shape == (bs, drafts)
