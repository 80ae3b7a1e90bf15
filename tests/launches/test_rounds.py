"""Every round stays within its budget, and the host waits for nothing."""

import tomllib
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving.verification import rehearsal
from tests.launches.counter import Counter, FakeCuda
from tests.launches.rounds import REQUESTS, ROUNDS, ROWS, TABLE, counted
from tests.launches.server import BLOCK, CANDIDATES, RANK, VOCABULARY
from triton_ops import operator

# Below this share of its budget a count has fallen: the budget is stale.
STALE = 0.9
BUDGETS = tomllib.loads(TABLE.read_text())


@pytest.mark.parametrize("row", ROWS)
def test_no_more_launches_and_bytes_than_the_budget(row):
    phases, name = ROWS[row]
    for bs in REQUESTS:
        round_ = counted(name, bs)
        launches, moved = round_.cost(*phases)
        most, most_moved = BUDGETS[row][str(bs)]
        message = f"{bs} requests: {launches} launches, {moved} bytes\n"
        message += "\n".join(f"{launch}" for launch in round_.launches if launch.phase in phases)
        assert launches == most and STALE * most_moved <= moved <= most_moved, message


def rehearsed(head: bool, vocabulary: int, *widths: int) -> Counter:
    """What a start runs; it may wait."""
    with FakeCuda() as cuda:
        tables = (torch.empty(vocabulary, RANK, device="cuda") for _ in range(2))
        names = dict(zip(("predecessor", "successor"), tables, strict=True))
        given = SimpleNamespace(gate=SimpleNamespace(out_features=RANK), **names)
        with cuda.count(may_wait=True) as counter:
            sizes = CANDIDATES, vocabulary, widths, "cuda"
            rehearsal.rehearse(given if head else None, *sizes, copied=BLOCK - 1)
    return counter


@pytest.mark.parametrize("condition", [True, False])
def test_every_operator_can_run_its_reference_on_a_gpu(condition, monkeypatch):
    """Whatever its conditions read, no reference mixes devices, and no kernel is launched."""

    def nonzero(tensor: torch.Tensor, as_tuple: bool = False):
        places = torch.zeros(3, tensor.ndim, dtype=torch.int64, device=tensor.device)
        return places.unbind(1) if as_tuple else places

    monkeypatch.setattr(operator, "reference_operators", {operator.ALL})
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: condition)
    monkeypatch.setattr(torch.Tensor, "nonzero", nonzero)
    counter = rehearsed(True, 300, 3)
    assert counter.launches and not counter.kinds


@pytest.mark.parametrize("head", [False, True])
def test_a_start_compiles_every_kernel_that_a_round_needs(head):
    counter = rehearsed(head, VOCABULARY, 1, 2, BLOCK)
    these = [n for n in ROUNDS if ("head" in n) == head and "no copies" not in n]
    needed = set().union(*(counted(name, bs).kinds for name in these for bs in REQUESTS))
    assert len(needed) > 8
    # The reducer has no batches.
    assert not {kind for kind in needed - counter.kinds if "hc_gate" not in kind[0]}
