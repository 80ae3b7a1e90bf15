"""The kernels of drafts against their torch references: in Triton's interpreter, or on a GPU."""

import itertools

import pytest
import torch

from sglang_hyperdflash.draft.propose import propose_greedy_reference, propose_reference
from tests.unit.triton_ops.gate_help import BF16, DEVICE, EVERYTHING, FP16, FP32, MANY, adjusting
from triton_ops import propose_kernel
from triton_ops.copies import KINDS, parts

INFINITE, NAN = float("inf"), float("nan")
NO_TOP_K = 1 << 30
ALL = "top_k top_p min_p"
NO_HEAD = dict.fromkeys(("gates", "predecessor", "successor"))
COPIES = ("copy_rows", "copy_counts")


def copies_of(ids, g):
    """Of every fifth request none; else some of the candidates, then any token or none at all."""
    bs, drafts, candidates = ids.shape
    chosen = torch.randint(0, candidates, (bs, drafts + 2), generator=g)
    rows = torch.randint(-1, 300, (bs, 2 * drafts + 5), generator=g)
    copies, _, kinds = parts(rows)
    some = torch.rand(bs, drafts, generator=g) < 0.7
    copies[:, :drafts][some] = ids.gather(-1, chosen[:, :drafts].unsqueeze(-1)).squeeze(-1)[some]
    kinds[:] = torch.arange(bs) % KINDS
    return rows, torch.randint(0, 9, (2, KINDS, 2), generator=g, dtype=torch.int32)


def arguments(
    bs, drafts, candidates, rank=None, dtype=FP32, exact=False, filters=ALL, changes="", bias=FP32
):
    """The operator's arguments in their order; a head has a ``rank`` and tables of a ``dtype``.

    Blocks and positions are columns of wider tensors. Request 1 of four is greedy if ``filters``
    name top_k; every second one has a seed of its own. ``exact`` scores are the same in any order
    of sums, and many are equal. ``bias`` is the dtype of one among the ``changes``.
    """
    g = torch.Generator().manual_seed(bs)
    request, vocabulary = torch.arange(bs), max(300, 2 * candidates)

    def normal(*shape):
        whole = torch.randint(-8, 9, shape, generator=g) / 4
        return whole if exact else torch.randn(*shape, generator=g)

    def cycle(*values):
        return torch.tensor(values)[request % len(values)]

    order = torch.rand(bs, drafts, vocabulary, generator=g).argsort(-1)
    ids = order[..., :candidates].contiguous()
    known = {"ids": ids, "scores": normal(bs, drafts, candidates) * 2} | NO_HEAD
    if rank is not None:
        known["gates"] = normal(bs, drafts, rank) / 4
        known["predecessor"] = normal(vocabulary, rank).to(dtype)
        known["successor"] = normal(vocabulary, rank).to(dtype)
    start = torch.randint(0, 1 << 20, (bs, 1), generator=g)
    wide = torch.randint(0, vocabulary, (bs, drafts + 5), generator=g)
    known |= {
        "block_tokens": wide[:, 2 : drafts + 3],
        "seeds": torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g),
        "seeded": request % 2 == 1,
        "positions": (start + torch.arange(drafts + 3))[:, : drafts + 1],
        "temperatures": cycle(0.7, 1.0, 1.3, 0.9, 2.0),
        "top_ks": cycle(NO_TOP_K, *((1, 3, candidates) if "top_k" in filters else ())).int(),
        "top_ps": cycle(0.9, 1.0, 0.3, 0.7, 0.99) if "top_p" in filters else torch.ones(bs),
        "min_ps": cycle(0.0, 0.03, 0.2) if "min_p" in filters else torch.zeros(bs),
        "draft_temperature": 0.7,
        "filters": bool(filters),
        "sequential": "sequential" in filters,
    } | dict.fromkeys(COPIES)
    if "copies" in changes:
        known |= dict(zip(COPIES, copies_of(ids, g), strict=True))
    ends = ids[:, 0, :3] if drafts else ids
    return known | adjusting(changes, start, drafts, ends, vocabulary, g, bias)


def on_device(known: dict) -> list:
    return [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in known.values()]


def check(known: dict) -> tuple[torch.Tensor, ...]:
    """The kernel's results, after the comparison with the reference's; and as if all were greedy.

    Sums run in another order. Of these seeds no two scores, nor a sum and a filter's bound, are so
    near that it matters.
    """
    expected = propose_reference(*known.values())
    results = tuple(t.cpu() for t in propose_kernel.launch(*on_device(known)))
    for one, other in zip(results, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    (tokens, q, choice, ids), (_, q_, *_) = results, expected
    assert all(torch.equal(results[i], expected[i]) for i in (0, 2, 3))
    assert torch.equal(ids.gather(-1, choice.unsqueeze(-1)).squeeze(-1), tokens)
    torch.testing.assert_close(q, q_, rtol=1e-5, atol=1e-6)
    assert (q[q_ > 1e-12] > 0).all() and (q_[q > 1e-12] > 0).all()
    names = "ids", "scores", *NO_HEAD
    greedy = {name: known[name] for name in names} | {"anchors": known["block_tokens"][:, 0]}
    greedy |= {name: known[name] for name in COPIES}
    expected = propose_greedy_reference(*greedy.values())
    drafts = propose_kernel.launch_greedy(*on_device(greedy)).cpu()
    assert drafts.dtype == expected.dtype and torch.equal(drafts, expected)
    return results


# Requests, drafts, candidates; a head's rank, which is read in pieces of 128 candidates.
SIZES = [(0, 3, 5), (2, 0, 5), (1, 1, 1), (3, 2, 3), (1, 9, 5), (4, 1, 64), (2, 2, 100)]
SIZES += [(MANY, 1, 2), (12, 3, 20, 33)]
HEADS = [(3, 2, 1, 1), (3, 2, 3, 5), (3, 2, 7, 256), (3, 2, 40, 40), (2, 2, 128, 256)]
SIZES += [(*sizes, dtype, True) for sizes in HEADS for dtype in (BF16, FP16, FP32)]


@pytest.mark.parametrize("sizes", SIZES)
def test_drafts_are_the_references(sizes):
    check(arguments(*sizes))


# A head's rank and what changes scores.
COPIED = [(None, ""), (5, ""), (None, EVERYTHING), (4, EVERYTHING)]


@pytest.mark.parametrize("candidates", [1, 3, 64])
@pytest.mark.parametrize(("rank", "changes"), COPIED)
def test_drafts_that_follow_copies(rank, changes, candidates):
    sizes = 10, 4, candidates, rank
    known = arguments(*sizes, exact=rank is not None, changes=f"{changes} copies")
    known["scores"] /= 4
    tokens, q, _, ids = check(known)
    copies, _, kinds = parts(known["copy_rows"])
    copies = copies[:, :4]
    follows = (tokens == copies).long().cumprod(1).bool()
    assert 0 < follows[kinds > 0].sum() < copies.numel()
    torch.testing.assert_close(q.sum(-1), torch.ones(10, 4))
    # What a copy replaced has no share but the copy's; without a match nothing changes.
    plain = check(known | dict.fromkeys(COPIES))
    for one, other in zip((tokens, q, ids), (plain[0], plain[1], plain[3]), strict=True):
        assert torch.equal(one[kinds == 0], other[kinds == 0])


@pytest.mark.parametrize("filters", ["", "plain", "sequential"])
@pytest.mark.parametrize("exact", [False, True])
def test_every_filter_with_every_other(exact, filters):
    grid = itertools.product((NO_TOP_K, 1, 3, 20), (1.0, 0.3, 0.9), (0.0, 0.2))
    top_ks, top_ps, min_ps = map(torch.tensor, zip(*grid, strict=True))
    if filters:
        limits = {"top_ks": top_ks.int(), "top_ps": top_ps, "min_ps": min_ps}
    else:  # a greedy request alone takes its largest
        limits = {"top_ks": torch.where(torch.arange(24) < 2, 1, NO_TOP_K).int()}
    known = arguments(24, 1, 20, filters=filters, exact=exact) | limits
    if exact:
        known["scores"][12:] = 1.5
    _, q, choice, _ = check(known)
    greedies = known["top_ks"] == 1
    assert torch.equal(choice[greedies], known["scores"][greedies].argmax(-1))
    assert (q[greedies].amax(-1) == 1).all()
    assert filters or (q[2:].amax(-1) < 1).all()


@pytest.mark.heavy
def test_many_candidates_are_sorted():
    known = arguments(1, 1, 600, filters="top_p min_p sequential")
    known["top_ks"][0], known["min_ps"][0], known["top_ps"][0] = 100, 0.01, 0.8
    q = check(known)[1]
    assert 1 < (q > 0).sum() < 100


@pytest.mark.parametrize(
    ("draft_temperature", "filters", "rank"),
    [(0.0, "", None), (0.5, "top_p min_p", None), (0.0, "top_p min_p", 3), (1.0, "", 3)],
)
def test_temperatures_of_every_size(draft_temperature, filters, rank):
    known = arguments(12, 1, 16, rank, filters=filters, exact=rank is not None)
    known["temperatures"] = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 1.0, 10.0]).repeat(2)
    known["seeded"] = torch.arange(12) >= 6
    known["draft_temperature"] = draft_temperature
    q = check(known)[1]
    assert (q[4:6].amax(-1) == 1).all() == (draft_temperature == 0)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", ["", "top_p min_p"])
def test_rows_that_are_no_distribution_draft_what_argmax_takes(filters, draft_temperature):
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
    known = arguments(18, 1, 4, 2, filters=filters)
    known["gates"].zero_()
    known["scores"] = torch.tensor(rows * 2).unsqueeze(1)
    known["temperatures"][[7, 16]] = 0.1  # divided by it the scores overflow
    known["seeded"] = torch.arange(18) < 9
    known["draft_temperature"] = draft_temperature
    check(known)
    first = [1, 0, 1, 0, 2, 0, None, None, None] * 2
    choice = check(known | NO_HEAD)[2][:, 0]
    assert all(b in (None, a) for a, b in zip(choice.tolist(), first, strict=True))
    # One among the rows of a block.
    known = arguments(3, 4, 8, 3)
    known["scores"][0, 1, 5], known["scores"][1, 2], known["gates"][2, 1] = NAN, -INFINITE, NAN
    check(known)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("changes", "rank", "bias"),
    [
        ("penalties", None, FP32),
        ("end_ids", None, FP32),
        ("bias", 4, BF16),
        ("bias", None, FP16),
        (EVERYTHING, 4, FP32),
    ],
)
def test_every_change_alone_and_together(changes, rank, bias):
    known = arguments(6, 3, 9, rank, exact=True, changes=changes, bias=bias)
    # Of all but one request all drafts have the same candidates, one likely: it comes again.
    known["ids"][:5] = known["ids"][:5, :1]
    known["scores"][:5, :, 2] = 20.0
    check(known)
    for name in ("ids", "scores"):  # an end token may be all there is
        known[name] = known[name][..., :1].contiguous()
    check(known)
