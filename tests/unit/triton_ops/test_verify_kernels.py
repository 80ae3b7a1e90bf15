"""Verification's kernels against their references: in Triton's interpreter, or on a GPU."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from sglang_hyperdflash.serving.verification.exact import unpack
from tests.unit.triton_ops.gate_help import BF16, DEVICE, FP16, FP32, MANY, in_order
from triton_ops import accept_kernel, finish_kernel, rows_kernel
from triton_ops.verification import accept_reference, finish_reference, row_statistics_reference

GREEDY, SEEDED, UNSEEDED = range(3)
KINDS = (UNSEEDED, GREEDY, UNSEEDED, SEEDED)  # of requests, in turn
INF, NAN = float("inf"), float("nan")
Round = dict[str, Any]  # the arguments of ``accept`` by name
NO_PROPOSAL = dict.fromkeys(("ids", "q", "choice"))
BARE = NO_PROPOSAL | dict.fromkeys(("logits", "kept", "largest", "total"))


def of_finish(given: Round, correct: torch.Tensor, weight: torch.Tensor, draws=True) -> Round:
    """The arguments of ``finish``: all but ``choice`` are its, too."""
    lengths = {"correct_drafts": correct, "weight": weight, "draws": draws}
    return {name: value for name, value in given.items() if name != "choice"} | lengths


def changed(given: Round, change) -> Round:
    return {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def of_rows(given: Round, all_draw: bool) -> Round:
    """The arguments of ``row_statistics``."""
    names = ("logits", "temperatures", "top_ks", "seeded", "seeds", "positions", "kept")
    return {name: given[name] for name in names} | {"all_draw": all_draw}


def read_again(given: Round) -> Round:
    """After a change of the logits or of what is kept."""
    results = row_statistics_reference(**of_rows(given, False))
    return given | dict(zip(("row_tokens", "largest", "total"), results, strict=True))


def half_kept(given: Round) -> torch.Tensor:
    """What a filter might keep: half of the tokens with their probabilities, and the likeliest.

    Of greedy requests, which no filter binds, not that one.
    """
    block, logits = given["positions"].shape[1], given["logits"].float()
    temperatures, top_ks = (given[n].repeat_interleave(block) for n in ("temperatures", "top_ks"))
    y = logits / temperatures.unsqueeze(-1)
    y = y.masked_fill(~y.isfinite(), -INF)
    passed = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).to(y.device) < 0.5
    likeliest = y == y.amax(-1, keepdim=True)
    return y.softmax(-1) * torch.where(likeliest, top_ks.unsqueeze(-1) > 1, passed)


def make_round(bs, drafts, width, vocabulary, dtype=FP32, filtered=False, kinds=KINDS) -> Round:
    """A batch of these ``kinds``, in turn; drafters so good that every length is accepted.

    Blocks and logits are columns of wider tensors. ``filtered`` forbids half the vocabulary.
    """
    g = torch.Generator().manual_seed(drafts)
    block, width = drafts + 1, min(width, vocabulary)
    kind = torch.tensor(kinds).repeat(-(-bs // len(kinds)))[:bs]
    logits = torch.randn(bs * block, vocabulary, generator=g).mul(2).to(dtype)
    temperatures = torch.rand(bs, generator=g) * 1.5 + 0.3
    rows = logits.view(bs, block, vocabulary)[:, :drafts].float()
    rows = rows / temperatures.view(-1, 1, 1) + torch.randn(rows.shape, generator=g) * 0.4
    scores, ids = rows.topk(width, -1)
    order = torch.rand(ids.shape, generator=g).argsort(-1)
    q, ids = scores.softmax(-1).gather(-1, order), ids.gather(-1, order)
    choice = (q / torch.empty_like(q).exponential_(generator=g)).argmax(-1)
    given = {"logits": logits, "kept": None, "ids": ids, "q": q}
    given |= {"choice": choice, "temperatures": temperatures, "vocabulary": vocabulary}
    given["top_ks"] = torch.where(kind == GREEDY, 1, vocabulary + 1).int()
    given["seeded"] = (kind == SEEDED) | ((kind == GREEDY) & (torch.rand(bs, generator=g) < 0.5))
    given["seeds"] = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g)
    given["positions"] = torch.randint(0, 2**20, (bs, 1), generator=g) + torch.arange(block)
    if filtered:
        given["kept"] = half_kept(given)
    given = read_again(given)
    # Drafts of greedy and seeded requests follow the target for a while.
    lengths = torch.randint(0, block, (bs, 1), generator=g)
    follows = (torch.arange(drafts) < lengths) & (kind != UNSEEDED).unsqueeze(1)
    drawn = ids.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
    drawn = torch.where(follows, given["row_tokens"].view(bs, block)[:, :-1], drawn)
    anchors = torch.randint(0, vocabulary, (bs, 1), generator=g)
    given["block_tokens"] = torch.cat([anchors, drawn], 1)
    given = changed(given, lambda t: t.to(DEVICE))
    blocks = pad(given["block_tokens"], (2, 5))[:, 2:-5]
    logits = pad(given["logits"], (5, 10), value=NAN)[:, 5:-10]
    return given | {"block_tokens": blocks, "logits": logits}


# Of :func:`corners`: requests with a broken row, and where it is; those of each other corner.
BROKEN, PLACES = slice(0, 12), torch.arange(12) // 3
IMPOSSIBLE, ONE_HOT, EXTREME, MASSLESS, EQUAL = (slice(i, i + 6) for i in range(12, 42, 6))


def corners() -> Round:
    """Rows broken in every way, of every kind of request and at every place of a block.

    Then requests without a seed: of impossible tokens and zeros of q; of one-hot drafts; of all
    temperatures; of a first draft that the target gives no mass; of a q that is p.
    """
    kinds = (UNSEEDED, SEEDED, GREEDY) * 4 + (UNSEEDED,) * 30
    given = make_round(42, 3, 8, 33, kinds=kinds)
    rows, q = given["logits"].view(42, 4, 33), given["q"]
    for request, place in enumerate(PLACES.tolist()):
        value = (NAN, INF, -INF)[(request + place) % 3]
        rows[request, place, slice(None) if value == -INF else 3] = value
    forbidden = torch.rand(6, 4, 33, generator=torch.Generator().manual_seed(0)) < 0.5
    rows[IMPOSSIBLE][forbidden.to(DEVICE)] = -INF
    rows[IMPOSSIBLE, :, 2] = 1.0
    q[IMPOSSIBLE, :, 3] = 0.0  # also of some drafts
    q[ONE_HOT] = 0.0
    q[ONE_HOT].scatter_(2, given["choice"][ONE_HOT].unsqueeze(2), 1.0)
    given["temperatures"][EXTREME] = torch.logspace(-5, 1, 6, device=DEVICE)
    rows[MASSLESS, 0].scatter_(1, given["block_tokens"][MASSLESS, 1:2], -INF)
    # Powers of two, so that no bit is lost; other tokens' mass underflows.
    given["temperatures"][EQUAL] = 1.0
    rows[EQUAL] = torch.linspace(-900, -300, 33, device=DEVICE)
    rows[EQUAL, :3].scatter_(2, given["ids"][EQUAL], 0.0)
    q[EQUAL] = 1 / 8
    return read_again(given)


def row_tokens(given: Round, all_draw: bool = True) -> torch.Tensor:
    """The kernel's tokens, after a comparison of its results with the reference's."""
    known = of_rows(given, all_draw)
    expected = row_statistics_reference(**known)
    result = rows_kernel.launch(*in_order(known, row_statistics_reference))
    assert [t.dtype for t in result] == [torch.int64, FP32, FP32]
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=0)
    # Sums of greedy requests are arbitrary, except that a broken row's are NaN.
    sampled = (given["top_ks"] > 1).repeat_interleave(given["positions"].shape[1])
    read = sampled | expected[1].isnan()
    for values, wanted, rtol in zip(result[1:], expected[1:], (0, 2e-6), strict=True):
        torch.testing.assert_close(values[read], wanted[read], rtol=rtol, atol=0, equal_nan=True)
    return result[0]


@pytest.mark.parametrize("all_draw", [False, True])
@pytest.mark.parametrize(
    ("bs", "block", "vocabulary", "dtype"),
    [
        (0, 2, 7, FP32),
        (6, 2, 1, FP32),
        (6, 1, 1025, FP16),
        (6, 1, 3001, BF16),
        (1, 10, 2048, FP32),
        (MANY, 1, 7, FP32),
    ],
)
def test_rows_are_the_references(bs, block, vocabulary, dtype, all_draw):
    given = make_round(bs, block - 1, 1, vocabulary, dtype)
    temperatures = torch.tensor([1.0, 1e-5, 10.0, 0.6, 0.01])[torch.arange(bs) % 5]
    given["temperatures"] = temperatures.to(DEVICE)
    row_tokens(given, all_draw)
    kept = half_kept(given)
    tokens = row_tokens(given | {"kept": kept}, all_draw)
    passed = (kept.gather(1, tokens.unsqueeze(1)) > 0).view(bs, block)
    greedy = given["top_ks"] == 1
    assert passed[~greedy & (given["seeded"] | all_draw)].all()
    best = given["logits"].argmax(-1).view(bs, block)
    assert torch.equal(tokens.view(bs, block)[greedy], best[greedy]), "no filter binds it"


ANY = -1
# What fills a row, None for noise; values by id; the token.
CORNERS = [
    # So large, the noise is lost in the score: ties within a tile, between lanes, between shares.
    (0.0, {2099: 1e25, 2049: 1e25}, 2049),
    (0.0, {17: 1e25, 1041: 1e25, 2050: 1e25}, 17),
    (0.0, {2047: 1e25, 2048: 1e25}, 2047),
    (1e25, {}, 0),
    # One broken logit, or nothing finite.
    (None, {0: NAN}, 2100),
    (None, {1030: INF}, 2100),
    (None, {2099: NAN}, 2100),
    (-INF, {}, 2100),
    (-INF, {5: NAN}, 2100),
    (-INF, {5: INF}, 2100),
    # As a grammar forbids tokens: a whole share of them.
    (-INF, {2097: 1.0}, 2097),
    (-INF, {2096: 1.0, 2097: 2.0}, ANY),
    (1e-3, {7: 2e-3}, ANY),
]


@pytest.mark.heavy
def test_ties_broken_rows_and_forbidden_tokens_of_every_kind_of_request():
    given = make_round(3 * len(CORNERS), 0, 1, 2100, kinds=(UNSEEDED, SEEDED, GREEDY))
    given["temperatures"].fill_(1.0)
    for rows, (fill, values, _) in zip(given["logits"].split(3), CORNERS, strict=True):
        if fill is not None:
            rows.fill_(fill)
        for token, value in values.items():
            rows[:, token] = value
    expected = torch.tensor([token for *_, token in CORNERS], device=DEVICE).repeat_interleave(3)
    assert ((row_tokens(given) == expected) | (expected == ANY)).all()
    row_tokens(given | {"kept": half_kept(given)})  # which may forbid the broken one


def test_one_kept_token_is_drawn_whatever_its_weight():
    given = make_round(9, 0, 1, 300, kinds=(UNSEEDED, SEEDED))
    likeliest = given["logits"].argmax(-1, keepdim=True)
    weights = torch.tensor([1e-45, 1.0, 1e20], device=DEVICE).repeat(3).unsqueeze(1)
    given["kept"] = torch.zeros_like(given["logits"]).scatter(1, likeliest, weights)
    assert torch.equal(row_tokens(given), likeliest.squeeze(1))
    given["logits"] = given["logits"].T.contiguous().T
    with pytest.raises(ValueError, match="stride"):
        row_tokens(given)


# p differs in its last bits, and so do h and the scores of bonus tokens: of these seeds no coin and
# no two tokens are so near that it matters.
def accepted(given: Round) -> torch.Tensor:
    """The kernel gives what the reference does; the accepted lengths."""
    expected = accept_reference(**given)
    result = accept_kernel.launch(*in_order(given, accept_reference))
    assert [t.dtype for t in result] == [t.dtype for t in expected]
    assert result[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-12)
    return result[0]


def committed(given: Round, correct: torch.Tensor, weight: torch.Tensor, draws: bool = True):
    """The kernels give what the reference does; what is committed."""
    known = of_finish(given, correct.to(DEVICE).int(), weight.to(DEVICE).double(), draws)
    expected = finish_reference(**known)
    packed = finish_kernel.launch(*in_order(known, finish_reference))
    assert packed.dtype == expected.dtype and torch.equal(packed, expected)
    return unpack(packed, *given["block_tokens"].shape)


def any_lengths(given: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts and their weights, whatever the round would accept."""
    bs, block = given["block_tokens"].shape
    g = torch.Generator().manual_seed(0)
    correct = torch.randint(0, block, (bs,), generator=g)
    return correct, torch.rand(bs, generator=g).masked_fill(correct == 0, 1.0)


@pytest.mark.parametrize(
    "sizes",  # requests, drafts, width, vocabulary; dtype, whether filtered
    [
        (0, 3, 4, 25, FP32, True),
        (1, 1, 1, 1, FP32, False),
        (6, 2, 5, 7, FP32, True),
        (4, 9, 64, 1025, BF16, False),
        (5, 6, 20, 1333, FP16, True),
        (2, 1, 2049, 2100, FP32, False),  # more candidates than a piece of ``accept``
        (MANY, 7, 13, 29, FP32, False),
    ],
)
def test_what_is_accepted_and_committed_is_the_references(sizes):
    given = make_round(*sizes)
    lengths = accepted(given)
    assert sizes[0] < MANY or len(set(lengths.tolist())) > 4
    committed(given, *any_lengths(given))
    # After the last draft no candidate counts.
    committed(given, torch.full_like(lengths, sizes[1]), torch.linspace(0.3, 1, sizes[0]))


@pytest.mark.parametrize("programs", [1, 8, 10_000])
def test_any_number_of_shares_draws_the_same(programs, monkeypatch):
    """Also where a share has several tiles, and one candidate is the first or last of a tile."""
    monkeypatch.setattr(rows_kernel, "PROGRAMS", programs)
    given = make_round(4, 3, 5, 3 * 1024 + 17, kinds=(UNSEEDED,))
    given["ids"][:] = torch.tensor([0, 1023, 1024, 3 * 1024 - 1, 3 * 1024 + 16])
    # They have most of the mass, so what is left of them decides.
    given["logits"].scatter_(1, given["ids"][0, 0].expand(16, 5), 9.0)
    given = read_again(given)
    given["q"].copy_(torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]))
    committed(given, torch.arange(4), torch.tensor([1.0, 0.9, 0.4, 0.7]))


def test_corners():
    given, everyone = corners(), torch.arange(42)
    lengths = accepted(given).cpu()
    assert (lengths[BROKEN] <= PLACES).all()
    assert not lengths[MASSLESS].any() and lengths[EQUAL].eq(3).all()
    assert len(set(lengths.tolist())) == 4
    correct, weight = everyone % 4, torch.linspace(0.1, 1, 42)
    correct[BROKEN] = PLACES
    weight[EQUAL] = torch.tensor([1.0, 0.25, 0.0] * 2)
    result = committed(given, correct, weight)
    bonus, rows = result.next_anchors.cpu(), given["logits"].view(42, 4, 33).cpu()
    assert result.tokens.cpu()[everyone, correct][BROKEN].eq(33).all()
    assert not bonus[BROKEN].any()
    assert rows[everyone, correct, bonus][IMPOSSIBLE].isfinite().all()
    drafts = given["block_tokens"].cpu()[everyone, 1 + correct.clamp(max=2)]
    assert ((bonus != drafts) | (correct == 3))[ONE_HOT].all()


@pytest.mark.parametrize("drafts", [0, 1, 6])
def test_without_a_proposal_and_draws_tokens_are_the_targets(drafts):
    """Rounds of width 1, and greedy ones: of them all that is known may be the rows' tokens."""
    given = make_round(9, drafts, 4, 25)
    known, bare = given | NO_PROPOSAL, given | BARE
    lengths = accepted(known)
    assert torch.equal(accepted(bare), lengths)
    assert drafts == 0 or len(set(lengths.tolist())) > 1
    given["row_tokens"][::5] = 25
    for one in (known, bare):
        committed(one, *any_lengths(given), draws=False)


def test_every_id_lies_in_exactly_one_share():
    assert finish_kernel.MAX_PARTS == finish_kernel.MAX_SHARES + 1
    kernels = (finish_kernel.BLOCK, finish_kernel), (rows_kernel.TILE, rows_kernel)
    sizes = (1, 7, 448, 1792), (1, 1024, 2049, 129_280, 151_936)
    for (tile, kernel), rows, vocabulary in itertools.product(kernels, *sizes):
        parts, tiles = rows_kernel.shares(rows, vocabulary, tile, kernel.MAX_SHARES)
        assert parts <= kernel.MAX_SHARES
        assert (parts - 1) * tiles * tile < vocabulary <= parts * tiles * tile
