"""The instrument refuses what is planted, says where, and counts what torch launches on CUDA."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from sglang_hyperdflash.serving.verification.verifier import Verifier
from tests.launches import rounds
from tests.launches.counter import (
    FakeCuda,
    MixesDevicesError,
    WaitsForDeviceError,
    WrongResultError,
)
from tests.launches.rounds import Cost
from tests.launches.server import CANDIDATES, ROUND
from triton_ops.traffic import kernel_bytes, size


@pytest.fixture
def cuda():
    with FakeCuda() as found:
        yield found


@triton.jit
def _add_one(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count) + 1, mask=at < count)


# What a mistake in verification could be, of the logits.
WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x[0, :2].tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask assignment": lambda x: x.__setitem__(x > 0, x[0, 0]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats on the device": lambda x: x.repeat_interleave(x[:, 0].long(), 0),
    "to the host": lambda x: x[0].cpu(),
    "from the host": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor((0.0, 0.0, 1.0)),
}
MIXES = {
    "host tensor": lambda x: x + torch.ones(x.shape[1]),
    "host index": lambda x: x[torch.arange(2)],
    "host tensor of a kernel": lambda x: _add_one[(1,)](x, torch.ones(3), 3, BLOCK=4),
}
FINE = {
    "scalar": lambda x: x * torch.tensor(2.0),
    "scalar assignment": lambda x: x.__setitem__(x > 0, 1.0),
    "host alone": lambda x: torch.ones(3).sum().item(),
    "later copy": lambda x: x[0].to("cpu", non_blocking=True),
}


def planted(mistake):
    """Verification with one more line."""
    original = Verifier.accept

    def accept(self, logits, *rest):
        mistake(logits)
        return original(self, logits, *rest)

    return mock.patch.object(Verifier, "accept", accept)


@pytest.mark.parametrize("name", WAITS)
def test_a_planted_wait_fails(name):
    with planted(WAITS[name]), pytest.raises(WaitsForDeviceError, match=r"test_counter\.py"):
        rounds.run("sampled, head", 8)


@pytest.mark.parametrize("name", MIXES)
def test_a_planted_host_tensor_fails(name):
    with planted(MIXES[name]), pytest.raises(MixesDevicesError, match=r"test_counter\.py"):
        rounds.run("sampled, head", 8)


@pytest.mark.parametrize("name", FINE)
def test_what_waits_for_nothing_passes(name):
    with planted(FINE[name]):
        rounds.run("sampled, head", 8)


def test_a_planted_launch_is_over_the_budget():
    budget = rounds.counted("sampled, head", 8).cost(*ROUND).budget
    with planted(lambda logits: logits[0].neg()):
        found = rounds.run("sampled, head", 8).cost(*ROUND)
    assert found.launches == budget.launches + 1
    assert any("launches, above" in line for line in found.against(budget))


def test_a_planted_copy_of_the_logits_is_over_the_budget():
    budget = rounds.counted("sampled, head", 8).cost(*ROUND).budget
    with planted(lambda logits: logits.clone()):
        wrong = rounds.run("sampled, head", 8).cost(*ROUND).against(budget)
    assert {line.split()[1].strip(",") for line in wrong} == {"launches", "bytes", "peak"}


def test_a_budget_that_is_far_above_is_stale():
    assert Cost(9, 950, 0).against(Cost(9, 1000, 0)) == []
    assert "stale" in Cost(9, 800, 0).against(Cost(9, 1000, 0))[0]
    assert "stale" in Cost(8, 1000, 0).against(Cost(9, 1000, 0))[0]
    own = Cost(9, 123_456, 12)
    assert own.budget == Cost(9, 124_000, 12) and own.against(own.budget) == []


def test_a_fake_that_says_something_else_fails(cuda):
    library = torch.library.Library("hyperdflash", "FRAGMENT")
    library.define("counter_test(Tensor x) -> Tensor")
    library.impl("counter_test", lambda x: x.new_empty(len(x), dtype=torch.int32), "CUDA")
    torch.library.register_fake("hyperdflash::counter_test", lambda x: x.new_empty(3), lib=library)
    with cuda.count(), pytest.raises(WrongResultError, match="int32"):
        torch.ops.hyperdflash.counter_test(torch.empty(3, device="cuda"))


@pytest.mark.parametrize(
    "call, launches, moved",
    [
        (lambda x: x.view(-1)[3:], 0, 0),
        (lambda x: x + 1, 1, 2 * 48),
        (lambda x: x.add_(x[0]), 1, 2 * 48 + 16),
        (lambda x: x.softmax(-1), 1, 2 * 48),
        (lambda x: x.masked_fill(x > 0, 1.0), 3, 48 + 12 + 48 + 12 + 48),
        (lambda x: x[:, :2].contiguous(), 1, 2 * 24),
        (lambda x: x.gather(1, torch.empty(3, 1, dtype=torch.int64, device="cuda")), 1, 24 + 24),
        (lambda x: x.fill_(0.0), 1, 48),
        (lambda x: torch.cat([x, x]), 1, 48 + 96),
        (lambda x: x.new_zeros(4), 1, 16),
        (lambda x: x.expand(5, 3, 4).clone(), 1, 48 + 240),
    ],
)
def test_launches_and_bytes_of_torch_s_operations(cuda, call, launches, moved):
    x = torch.empty(3, 4, device="cuda")
    with cuda.count() as counter:
        call(x)
    assert sum(launch.launches for launch in counter.found) == launches
    assert sum(launch.moved for launch in counter.found) == moved


def test_a_kernel_is_one_launch_of_the_tensors_that_it_gets(cuda):
    x = torch.empty(1000, device="cuda")
    with cuda.count("one") as counter:
        _add_one[(8,)](x, torch.empty_like(x), 1000, BLOCK=128)
        _add_one[(8,)](x, x, 1000, BLOCK=128)  # stands for an absent one
    assert [(launch.phase, launch.moved) for launch in counter.found] == [
        ("one", 8000),
        ("one", 4000),
    ]
    assert counter.found[0].name.endswith("test_counter._add_one")


def test_peak_memory_is_what_lives_at_once_and_was_not_there_before(cuda):
    x = torch.empty(1000, device="cuda")
    with cuda.count() as counter:
        a = x + 1  # 4000
        b = a * 2  # 8000
        del a
        c = b.view(10, 100) + b.view(10, 100)  # 8000
        del b
        c.add_(1)
        x.mul_(2)
    assert counter.peaks[""] == 8000


def test_kernels_read_what_they_gather_not_whole_tables():
    """Candidates of the logits, one row of them, rows of a head's tables."""
    meta = {"device": "meta"}
    logits = torch.empty(14, 1000, **meta)
    ids = torch.empty(2, 6, CANDIDATES, dtype=torch.int64, **meta)
    arguments = {"logits_ptr": logits, "kept_ptr": logits, "ids_ptr": ids, "HAS_IDS": True}
    own = size(ids) + ids.numel() * 4
    accept = "triton_ops.accept_kernel._accept_kernel"
    assert kernel_bytes(accept, arguments | {"HAS_KEPT": False}) == own
    assert kernel_bytes(accept, arguments | {"HAS_KEPT": True}) == own + ids.numel() * 4
    assert kernel_bytes("another", arguments) == size(logits) + size(ids)
