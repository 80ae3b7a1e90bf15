"""What is accepted and committed, against references: in Triton's interpreter, or on a GPU."""

import itertools
from dataclasses import dataclass, fields, replace
from typing import Self

import pytest
import torch
from torch.nn.functional import pad

from sglang_hyperdflash.serving.verification.exact import unpack
from tests.unit.triton_ops.gate_help import DEVICE, MANY
from triton_ops import accept_kernel, finish_kernel, rows_kernel, verification

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GREEDY, SEEDED, UNSEEDED = range(3)
INF, NAN = float("inf"), float("nan")


@dataclass
class Round:
    """The arguments of ``accept`` in their order; all but ``choice`` are ``finish``'s, too."""

    logits: torch.Tensor | None
    kept: torch.Tensor | None
    row_tokens: torch.Tensor
    largest: torch.Tensor | None
    total: torch.Tensor | None
    block_tokens: torch.Tensor
    ids: torch.Tensor | None
    q: torch.Tensor | None
    choice: torch.Tensor | None
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    seeded: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    vocabulary: int

    def of_accept(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def of_finish(self, correct: torch.Tensor, weight: torch.Tensor, draws: bool = True) -> tuple:
        given = self.of_accept()
        return (*given[:8], correct, weight, *given[9:14], draws, self.vocabulary)

    def changed(self, change) -> Self:
        """Each tensor through ``change``."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})

    @property
    def rows(self) -> torch.Tensor:
        """The logits, ``[bs, B, V]``."""
        return self.logits.view(*self.block_tokens.shape, -1)

    def read_again(self) -> Self:
        """After a change of the logits or of what is kept."""
        tokens, largest, total = verification.row_statistics_reference(
            *(self.logits, self.temperatures, self.top_ks, self.seeded, self.seeds),
            *(self.positions, self.kept, False),
        )
        return replace(self, row_tokens=tokens, largest=largest, total=total)

    def without_proposal(self, known: bool = True) -> Self:
        """Not even logits, unless they are ``known``."""
        given = replace(self, ids=None, q=None, choice=None)
        return given if known else replace(given, logits=None, kept=None, largest=None, total=None)


def make_round(
    bs: int,
    drafts: int,
    width: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    filtered: bool = False,
    seed: int = 0,
    kinds: tuple[int, ...] = (UNSEEDED, GREEDY, UNSEEDED, SEEDED),
) -> Round:
    """A mixed batch whose drafters are good enough that every length is accepted.

    Its blocks and logits are columns of wider tensors.

    Args:
        filtered: whether ``kept`` forbids half the vocabulary; kinds: of the requests, in turn.
    """
    g = torch.Generator().manual_seed(seed)
    block, width = drafts + 1, min(width, vocabulary)
    kind = torch.tensor(kinds).repeat(-(-bs // len(kinds)))[:bs]
    logits = torch.randn(bs * block, vocabulary, generator=g).mul(2).to(dtype)
    temperatures = torch.rand(bs, generator=g) * 1.5 + 0.3
    rows = logits.view(bs, block, vocabulary)[:, :drafts].float()
    rows = rows / temperatures.view(-1, 1, 1) + torch.randn(rows.shape, generator=g) * 0.4
    scores, ids = rows.topk(width, -1)
    order = torch.rand(ids.shape, generator=g).argsort(-1)
    q, ids = scores.softmax(-1).gather(-1, order), ids.gather(-1, order)
    choice = ids.new_zeros(bs, drafts)
    if drafts:
        choice = torch.multinomial(q.view(-1, width), 1, generator=g).view(bs, drafts)
    anchors = torch.randint(0, vocabulary, (bs, 1), generator=g)
    start = torch.randint(0, 2**20, (bs, 1), generator=g)
    kept = None
    if filtered:
        kept = torch.rand(bs * block, vocabulary, generator=g)
        kept[kept < 0.5] = 0.0
        kept[:, 0] = 0.5
    made = Round(
        *(logits, kept, logits.new_empty(0), None, None),
        torch.cat([anchors, ids.gather(-1, choice.unsqueeze(-1)).squeeze(-1)], 1),
        *(ids, q, choice, temperatures),
        torch.where(kind == GREEDY, 1, vocabulary + 1).int(),
        (kind == SEEDED) | ((kind == GREEDY) & (torch.rand(bs, generator=g) < 0.5)),
        torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g),
        start + torch.arange(block),
        vocabulary,
    ).read_again()
    if drafts:  # those of greedy and seeded requests follow the target for a while
        lengths = torch.randint(0, block, (bs, 1), generator=g)
        follows = (torch.arange(drafts) < lengths) & (kind != UNSEEDED).unsqueeze(1)
        targets = made.row_tokens.view(bs, block)[:, :-1]
        made.block_tokens[:, 1:] = torch.where(follows, targets, made.block_tokens[:, 1:])
    made = made.changed(lambda t: t.to(DEVICE))
    blocks, logits = pad(made.block_tokens, (2, 5)), pad(made.logits, (5, 10), value=NAN)
    return replace(made, block_tokens=blocks[:, 2:-5], logits=logits[:, 5:-10])


# Of :func:`corners`: requests with a broken row, and where it is; those of each other corner.
BROKEN, PLACES = slice(0, 12), torch.arange(12) // 3
IMPOSSIBLE, ONE_HOT, EXTREME, MASSLESS, EQUAL = (slice(i, i + 6) for i in range(12, 42, 6))


def corners() -> Round:
    """Rows broken in every way, of every kind of request and at every place of a block.

    Then requests without a seed: of impossible tokens and zeros of q; of one-hot drafts; of all
    temperatures; of a first draft that the target gives no mass; of a q that is p.
    """
    kinds = (UNSEEDED, SEEDED, GREEDY) * 4 + (UNSEEDED,) * 30
    given = make_round(42, 3, 8, 33, seed=4, kinds=kinds)
    rows, q, choice = given.rows, given.q, given.choice.unsqueeze(2)
    for request, place in enumerate(PLACES.tolist()):
        value = (NAN, INF, -INF)[(request + place) % 3]
        rows[request, place, slice(None) if value == -INF else 3] = value
    forbidden = torch.rand(6, 4, 33, generator=torch.Generator().manual_seed(0)) < 0.5
    rows[IMPOSSIBLE][forbidden.to(DEVICE)] = -INF
    rows[IMPOSSIBLE, :, 2] = 1.0
    q[IMPOSSIBLE, :, 3] = 0.0  # also of some drafts
    q[ONE_HOT] = 0.0
    q[ONE_HOT].scatter_(2, choice[ONE_HOT], 1.0)
    given.temperatures[EXTREME] = torch.logspace(-5, 1, 6, device=DEVICE)
    rows[MASSLESS, 0].scatter_(1, given.block_tokens[MASSLESS, 1:2], -INF)
    # Powers of two, so that no bit is lost; other tokens' mass underflows.
    given.temperatures[EQUAL] = 1.0
    rows[EQUAL] = torch.linspace(-900, -300, 33, device=DEVICE)
    rows[EQUAL, :3].scatter_(2, given.ids[EQUAL], 0.0)
    q[EQUAL] = 1 / 8
    return given.read_again()


# p differs in its last bits, and so do h and the scores of bonus tokens: of these seeds no coin and
# no two tokens are so near that it matters.
def accepted(given: Round) -> torch.Tensor:
    """The kernel gives what the reference does; the accepted lengths."""
    result = accept_kernel.launch(*given.of_accept())
    expected = verification.accept_reference(*given.of_accept())
    assert [t.dtype for t in result] == [t.dtype for t in expected]
    assert result[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(result[2], expected[2], rtol=1e-5, atol=1e-30, equal_nan=True)
    return result[0]


def committed(given: Round, correct: torch.Tensor, weight: torch.Tensor, draws: bool = True):
    """The kernels give what the reference does; what is committed."""
    lengths = correct.to(DEVICE).int(), weight.to(DEVICE).double()
    arguments = given.of_finish(*lengths, draws)
    packed, expected = finish_kernel.launch(*arguments), verification.finish_reference(*arguments)
    assert packed.dtype == expected.dtype and torch.equal(packed, expected)
    return unpack(packed, *given.block_tokens.shape)


def any_lengths(given: Round, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts and their weights, whatever the round would accept."""
    bs, block = given.block_tokens.shape
    g = torch.Generator().manual_seed(seed)
    correct = torch.randint(0, block, (bs,), generator=g)
    weight = torch.rand(bs, generator=g, dtype=torch.float64)
    weight[correct == 0] = 1.0
    return correct.to(DEVICE), weight.to(DEVICE)


@pytest.mark.parametrize(
    "sizes",  # requests, drafts, width, vocabulary; dtype, whether filtered
    [
        (1, 1, 1, 1, FP32, False),
        (6, 2, 5, 7, FP32, True),
        (4, 9, 64, 1025, BF16, False),
        (5, 6, 20, 1333, FP16, True),
        (2, 1, 2049, 2100, FP32, False),  # more candidates than a piece of ``accept``
        (MANY, 7, 13, 29, FP32, False),
    ],
)
def test_what_is_accepted_and_committed_is_the_references(sizes):
    given = make_round(*sizes, seed=sizes[1])
    lengths = accepted(given)
    assert sizes[0] < MANY or len(set(lengths.tolist())) > 4
    committed(given, *any_lengths(given))
    # After the last draft no candidate counts.
    committed(given, torch.full_like(lengths, sizes[1]), torch.linspace(0.3, 1, sizes[0]))


def test_corners_of_acceptance():
    lengths = accepted(corners()).cpu()
    assert (lengths[BROKEN] <= PLACES).all()
    assert not lengths[MASSLESS].any() and lengths[EQUAL].eq(3).all()
    assert len(set(lengths.tolist())) == 4


@pytest.mark.parametrize("programs", [1, 8, 10_000])
def test_any_number_of_shares_draws_the_same(programs, monkeypatch):
    """Also where a share has several tiles, and one candidate is the first or last of a tile."""
    monkeypatch.setattr(rows_kernel, "PROGRAMS", programs)
    given = make_round(4, 3, 5, 3 * 1024 + 17, seed=4, kinds=(UNSEEDED,))
    given.ids[:] = torch.tensor([0, 1023, 1024, 3 * 1024 - 1, 3 * 1024 + 16])
    # They have most of the mass, so what is left of them decides.
    given.logits.scatter_(1, given.ids[0, 0].expand(16, 5), 9.0)
    given = given.read_again()
    given.q.copy_(torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]))
    committed(given, torch.arange(4), torch.tensor([1.0, 0.9, 0.4, 0.7]))


def test_corners_of_what_is_committed():
    given, everyone = corners(), torch.arange(42)
    correct, weight = everyone % 4, torch.linspace(0.1, 1, 42)
    correct[BROKEN] = PLACES
    weight[EQUAL] = torch.tensor([1.0, 0.25, 0.0] * 2)
    result = committed(given, correct, weight)
    bonus, rows = result.next_anchors.cpu(), given.rows.cpu()
    assert result.tokens.cpu()[everyone, correct][BROKEN].eq(33).all()
    assert not bonus[BROKEN].any()
    assert rows[everyone, correct, bonus][IMPOSSIBLE].isfinite().all()
    drafts = given.block_tokens.cpu()[everyone, 1 + correct.clamp(max=2)]
    assert ((bonus != drafts) | (correct == 3))[ONE_HOT].all()


@pytest.mark.parametrize("drafts", [0, 1, 6])
def test_without_a_proposal_and_draws_tokens_are_the_targets(drafts):
    """Rounds of width 1, and greedy ones: of them all that is known may be the rows' tokens."""
    given = make_round(9, drafts, 4, 25, seed=drafts)
    known, bare = (given.without_proposal(known) for known in (True, False))
    lengths = accepted(known)
    assert torch.equal(accepted(bare), lengths)
    assert drafts == 0 or len(set(lengths.tolist())) > 1
    given.row_tokens[::5] = 25
    for one in (known, bare):
        committed(one, *any_lengths(given), draws=False)


def test_no_requests_are_nothing_to_do():
    empty = make_round(4, 3, 4, 25, filtered=True).changed(lambda t: t[:0])
    assert [t.shape for t in accept_kernel.launch(*empty.of_accept())] == [(0,), (0,), (0, 3, 4)]
    lengths = empty.top_ks, empty.temperatures.double()
    assert finish_kernel.launch(*empty.of_finish(*lengths)).shape == (0,)


def test_every_id_lies_in_exactly_one_share():
    assert finish_kernel.MAX_PARTS == finish_kernel.MAX_SHARES + 1
    limits = [(finish_kernel.BLOCK, finish_kernel.MAX_SHARES)]
    limits += [(rows_kernel.TILE, rows_kernel.MAX_SHARES)]
    sizes = (1, 7, 448, 1792), (1, 1024, 2049, 129_280, 151_936)
    for (tile, most), rows, vocabulary in itertools.product(limits, *sizes):
        parts, tiles = rows_kernel.shares(rows, vocabulary, tile, most)
        assert parts <= most
        assert (parts - 1) * tiles * tile < vocabulary <= parts * tiles * tile
