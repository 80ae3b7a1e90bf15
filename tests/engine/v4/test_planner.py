"""The planner of the compressors' rings: SGLang's CUDA source, on the host, and its torch form."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.engine.v4 import plans
from tests.engine.v4.findings import note
from tests.engine.v4.planner import Planner
from tests.engine.v4.product import PAGE, PAGES, PREFIXES, WIDTHS
from tests.engine.v4.states import live

pytestmark = pytest.mark.v4
RINGS = {4: 16, 128: 256}  # SGLang's, with speculation
BOTH = pytest.mark.parametrize("ratio", RINGS)
PREFIX = torch.tensor(PREFIXES)
REQUEST = torch.randperm(len(PREFIXES), generator=torch.Generator().manual_seed(0)) + 1


@pytest.fixture(scope="module")
def planner(tmp_path_factory) -> Planner:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile SGLang's planner with")
    return Planner(tmp_path_factory.mktemp("planner"), compiler)


@pytest.fixture(scope="module")
def slots() -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's slots ``[requests, tokens]`` and the sliding-window slot of each of them."""
    draw = torch.Generator().manual_seed(1)
    count = (len(PREFIXES) + 1) * PAGES
    pages, windows = (torch.randperm(count, generator=draw) for _ in range(2))
    within = torch.arange(PAGE)
    table = (pages[:, None] * PAGE + within).view(-1, PAGES * PAGE).int()
    return table, (windows[:, None] * PAGE + within).flatten()


def compressions(rows: torch.Tensor) -> list[list[int]]:
    """Those of a plan, in order; which pages are named is nothing where none is read."""
    rows = rows[rows[:, 0] != -1].clone()
    rows[(rows[:, 1] >> 16) == 0, 2:] = -1
    return sorted(rows.tolist())


def writes(rows: torch.Tensor) -> list[list[int]]:
    return sorted(rows[rows[:, 0] != -1].tolist())


def both_plans(planner, slots, ratio, request, seq_lens, extend, ring, req_ring=False):
    """Compressions and writes of SGLang's source, then those of the torch form."""
    table, windows = slots
    given = (ratio, request, seq_lens, extend, table, windows, PAGE, ring, int(extend.sum()))
    yield from zip((compressions, writes), planner.prefill(*given, req_ring), strict=True)
    torch_form = plans.plan_prefill(*given, use_cuda_graph=True, use_req_ring=req_ring)
    rows = (part.view(torch.int32) for part in torch_form[1:3])
    yield from zip((compressions, writes), rows, strict=True)


def assert_equal_plans(*given, **options) -> int:
    """Returns how many entries were compared."""
    a, b, c, d = (ordered(rows) for ordered, rows in both_plans(*given, **options))
    assert a == c
    assert b == d
    return len(a) + len(b)


@BOTH
def test_every_block_is_planned_as_sglangs_source_plans_it(planner, slots, ratio):
    compared = 0
    for width in WIDTHS:
        extend = torch.full_like(PREFIX, width)
        for req_ring in {False, ratio == 4}:
            given = (ratio, REQUEST, PREFIX + width, extend, RINGS[ratio], req_ring)
            compared += assert_equal_plans(planner, slots, *given)
    note(f"planner: c_plan.cuh on the host against its torch form, ratio {ratio}", entries=compared)


@BOTH
def test_a_planner_that_keeps_four_rows_is_noticed(planner, slots, ratio, monkeypatch):
    """As SGLang's did before #34189; wider blocks lost rows (#33872)."""
    monkeypatch.setattr(plans.Rings, "pad", 4)
    plan = (planner, slots, ratio, REQUEST)
    assert_equal_plans(*plan, PREFIX + 4, torch.full_like(PREFIX, 4), RINGS[ratio])
    with pytest.raises(AssertionError):
        assert_equal_plans(*plan, PREFIX + 7, torch.full_like(PREFIX, 7), RINGS[ratio])


@BOTH
@pytest.mark.parametrize("ring", [1, 2])
def test_prefills_and_decode_steps_are_planned_as_sglangs_source_does(planner, slots, ratio, ring):
    ring *= RINGS[ratio] // 2
    draw = torch.Generator().manual_seed(2)
    for _ in range(20):
        some = torch.randperm(len(REQUEST), generator=draw)[:4]
        end = torch.randint(1, PAGES * PAGE, (4,), generator=draw)
        extend = (torch.rand(4, generator=draw) * end).long() + 1
        given = (ratio, REQUEST[some], end, extend.minimum(end), ring)
        assert assert_equal_plans(planner, slots, *given) > 0
    table, windows = slots
    for step in range(ratio):
        lengths = PREFIX + step
        found = planner.decode(ratio, REQUEST, table, windows, lengths, PAGE, ring)
        given = (ratio, REQUEST, table, windows, lengths, PAGE, ring)
        assert torch.equal(found, plans.plan_decode(*given).plan_d.view(torch.int32))


def rows_of(slots, ratio: int, request: int, positions) -> set[int]:
    rings = plans.Rings(ratio, *slots, PAGE, RINGS[ratio], by_request=False)
    at = torch.tensor(list(positions), dtype=torch.int64)
    return set(rings.row(torch.full_like(at, request), at).tolist())


def lost(planner, slots, ratio: int, width: int) -> tuple[int, int]:
    """Requests whose block of ``width`` overwrites, or does not keep, what may still be needed."""
    request, start = REQUEST[8:], PREFIX[8:]
    extend = torch.full_like(start, width)
    given = (ratio, request, start + width, extend, *slots, PAGE, RINGS[ratio], int(extend.sum()))
    kept = {row for _, row in writes(planner.prefill(*given)[1])}
    overwritten = forgotten = 0
    for one, first in zip(request.tolist(), start.tolist(), strict=True):
        least = [at for at in live(first + 1, ratio) if at < first]
        overwritten += bool(kept & rows_of(slots, ratio, one, least))
        own = {at for n in range(1, width + 1) for at in live(first + n, ratio) if at >= first}
        forgotten += not rows_of(slots, ratio, one, own) <= kept
    return overwritten, forgotten


@BOTH
def test_blocks_as_wide_as_sglang_admits_lose_nothing_and_one_row_more_does(planner, slots, ratio):
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
        get_compress_state_ring_size,
        get_compress_state_write_pad,
    )

    ring = get_compress_state_ring_size(ratio, num_draft_tokens=7)
    most = get_compress_state_write_pad(ratio, ring)
    assert (ring, most) == (RINGS[ratio], {4: 10, 128: 130}[ratio])
    assert planner.pad(ratio, ring) == most
    widths = WIDTHS if ratio == 4 else (*WIDTHS, most)
    assert all(lost(planner, slots, ratio, width) == (0, 0) for width in widths)
    overwritten, forgotten = lost(planner, slots, ratio, most + 1)
    assert overwritten > 0
    assert forgotten > 0
