"""The planner of the compressors' rings: SGLang's CUDA source, on the host, and its torch form."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.engine.v4 import plans
from tests.engine.v4.findings import note
from tests.engine.v4.planner import Planner
from tests.engine.v4.product import PAGE, PAGES, PREFIXES, WIDTHS

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


def ordered(plan: tuple[torch.Tensor, torch.Tensor]) -> tuple[list, list]:
    """Compressions and writes in order; which pages are named is nothing where none is read."""
    compressions, writes = (rows[rows[:, 0] != -1].clone() for rows in plan)
    compressions[(compressions[:, 1] >> 16) == 0, 2:] = -1
    return sorted(compressions.tolist()), sorted(writes.tolist())


def assert_equal_plans(planner, slots, ratio, request, end, extend, ring, by_request=False) -> int:
    """Of SGLang's source and the torch form; returns how many entries were compared."""
    given = (ratio, request, end, extend, *slots, PAGE, ring, int(extend.sum()))
    source = ordered(planner.prefill(*given, by_request))
    torch_form = plans.plan_prefill(*given, True, by_request)
    assert source == ordered([part.view(torch.int32) for part in torch_form[1:3]])
    return sum(map(len, source))


@BOTH
def test_every_step_is_planned_as_sglangs_source_plans_it(planner, slots, ratio):
    """Blocks of every width; prefills and decode steps, also in rings without speculation."""
    compared, ring = 0, RINGS[ratio]
    for width in WIDTHS:
        block = (PREFIX + width, torch.full_like(PREFIX, width), ring)
        for by_request in {False, ratio == 4}:
            compared += assert_equal_plans(planner, slots, ratio, REQUEST, *block, by_request)
    note(f"planner: c_plan.cuh on the host against its torch form, ratio {ratio}", entries=compared)
    draw = torch.Generator().manual_seed(2)
    for size in (ring // 2, ring):
        for _ in range(20):
            some = torch.randperm(len(REQUEST), generator=draw)[:4]
            end = torch.randint(1, PAGES * PAGE, (4,), generator=draw)
            extend = ((torch.rand(4, generator=draw) * end).long() + 1).minimum(end)
            assert assert_equal_plans(planner, slots, ratio, REQUEST[some], end, extend, size) > 0
        for step in range(ratio):
            given = (ratio, REQUEST, *slots, PREFIX + step, PAGE, size, False)
            torch_form = plans.plan_decode(*given).plan_d.view(torch.int32)
            assert torch.equal(planner.decode(*given), torch_form)


@BOTH
def test_sglangs_source_keeps_as_many_rows_as_its_pool_says(planner, ratio):
    """A block may have as many; ``test_states`` shows that fewer kept rows are noticed."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

    ring = pools.get_compress_state_ring_size(ratio, num_draft_tokens=7)
    most = pools.get_compress_state_write_pad(ratio, ring)
    assert (ring, most) == (RINGS[ratio], {4: max(WIDTHS), 128: 130}[ratio])
    assert planner.pad(ratio, ring) == most
