"""Every round stays within its budget, waits for nothing, and launches no more than its goal.

``python -m tests.launches --round NAME --requests N`` lists what a round launches, and
``python -m tests.launches --write`` makes the counts the budgets after a change that is meant.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.serving.verification import rehearsal
from tests.launches import rounds
from tests.launches.__main__ import operations
from tests.launches.counter import Counter, FakeCuda, WaitsForDeviceError
from tests.launches.rounds import PARTS, REQUESTS, ROUNDS, counted
from tests.launches.server import BLOCK, CANDIDATES, PATHS, RANK, ROUND, VOCABULARY, WIDTH

# Bytes that a sampled verification of 64 requests may move without filters.
VERIFICATION_BYTES = 350_000_000
UNFILTERED = ("sampled", "sampled, head", "seeded, head", "mixed, head")


@pytest.fixture(scope="module")
def budgets():
    return rounds.read_budgets()


def test_every_round_and_part_has_a_budget_and_no_other_has(budgets):
    assert budgets.keys() == ROUNDS.keys() | PARTS.keys()
    assert all(tuple(costs) == REQUESTS for costs in budgets.values())


@pytest.mark.parametrize("bs", REQUESTS)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_stays_within_its_budget(budgets, name, bs):
    wrong = counted(name, bs).cost(*ROUND).against(budgets[name][bs])
    assert not wrong, f"{wrong}; {operations(name, bs)}"


@pytest.mark.parametrize("bs", REQUESTS)
@pytest.mark.parametrize("part", PARTS)
def test_what_is_around_a_round_stays_within_its_budget(budgets, part, bs):
    phase, name = PARTS[part]
    wrong = counted(name, bs).cost(phase).against(budgets[part][bs])
    assert not wrong, f"{wrong}; {operations(name, bs)}"


@pytest.mark.parametrize("bs", REQUESTS)
@pytest.mark.parametrize("name", [name for name, kind in ROUNDS.items() if kind.goal])
def test_a_round_launches_no_more_than_its_goal(name, bs):
    found = counted(name, bs).cost(*ROUND).launches
    assert found <= ROUNDS[name].goal, operations(name, bs)


@pytest.mark.parametrize("name", UNFILTERED)
def test_a_verification_reads_the_logits_about_once(name):
    assert counted(name, 64).cost("verification").bytes <= VERIFICATION_BYTES


@pytest.mark.parametrize("width", range(2, BLOCK))
@pytest.mark.parametrize("name", ["greedy, head", "sampled, head", "mixed, head, everything"])
def test_a_narrower_block_costs_no_more(name, width):
    narrow, whole = rounds.run(name, 8, width=width).cost(*ROUND), counted(name, 8).cost(*ROUND)
    assert narrow.launches <= whole.launches
    assert narrow.bytes < whole.bytes


def test_ranks_share_drafts_and_what_is_committed():
    found = [x.phase for x in counted("sampled, head, 2 ranks", 8).found if x.name == "broadcast"]
    assert found == ["drafting", "verification"]


def test_a_batch_of_other_requests_waits_for_nothing():
    """Its parameters come through pinned memory; counts of tokens are reset on the device."""
    names = {x.name for x in counted("sampled, head", 64).found if x.phase == "new batch"}
    assert names == {"async_h2d"}


def test_a_window_that_is_planned_on_the_host_waits_where_the_code_says_so():
    with pytest.raises(WaitsForDeviceError, match=r"draft_kv\.py:\d+ context"):
        rounds.run("sampled, head, window", 8, host_lengths=True)


@pytest.mark.parametrize("tokens", [1, 257])
def test_the_reducer_s_operator_runs_its_kernels(tokens):
    """Serving calls the kernels without the operator; torch.compile and training call this one."""
    with FakeCuda() as cuda:
        with torch.device("cuda"):
            reducer = HCGateReducer(PATHS, WIDTH, rms_eps=1e-6, hc_eps=1e-6)
            hidden = torch.empty(tokens, PATHS * WIDTH, dtype=torch.bfloat16)
        with cuda.count() as counter:
            operands, epsilons = reducer.operands(hidden, None), reducer.epsilons
            torch.ops.hyperdflash.hc_gate_reduce(*operands, *epsilons.values())
    kernels = [x.name.rpartition(".")[2] for x in counter.found]
    assert kernels == (["_row_kernel"] if tokens == 1 else ["zeros", "_tile_kernel"])


def kinds_of(run) -> set[tuple]:
    """What makes a compilation of its own, of all kernels of ``run`` but the reducer's."""
    found, original = set(), Counter.kernel

    def kernel(self, launched, args, kwargs):
        name = f"{launched.fn.__module__}.{launched.fn.__name__}"
        if name.startswith("triton_ops.") and "hc_gate" not in name:
            absent = tuple(argument is None for argument in args)
            found.add((name, absent, tuple(sorted(kwargs.items()))))
        return original(self, launched, args, kwargs)

    with mock.patch.object(Counter, "kernel", kernel):
        run()
    return found


@pytest.mark.parametrize("head", [False, True])
def test_a_start_compiles_every_kernel_that_a_round_needs(head):
    def start() -> None:
        with FakeCuda() as cuda:
            made = rehearsal.DraftTemperature("cuda")  # copies its values to the device
            with (
                mock.patch.object(rehearsal, "DraftTemperature", lambda device: made),
                cuda.count(),
            ):
                build()

    def build() -> None:
        gate = SimpleNamespace(out_features=RANK)
        tables = (torch.empty(VOCABULARY, RANK, device="cuda") for _ in range(2))
        names = dict(zip(("predecessor", "successor"), tables, strict=True))
        own = SimpleNamespace(gate=gate, **names) if head else None
        rehearsal.compile_kernels(own, CANDIDATES, VOCABULARY, (1, BLOCK), "cuda")

    compiled = kinds_of(start)
    names = [name for name in ROUNDS if ("head" in name) == head]
    needed = kinds_of(lambda: [rounds.run(name, bs) for name in names for bs in (1, 8)])
    assert len(needed) > 8
    # The draft's graph runs its own before it is captured.
    missing = {kind for kind in needed - compiled if "_greedy_kernel" not in kind[0]}
    assert not missing
