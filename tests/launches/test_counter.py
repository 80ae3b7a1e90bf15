"""The counter refuses what is planted, says where, and counts what torch launches on CUDA."""

import pytest
import torch
import triton
import triton.language as tl

from tests.launches.counter import FakeCuda, RefusedError


@triton.jit
def _add_one(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count) + 1, mask=at < count)


WAITS = [
    lambda x: x.sum().item(),
    lambda x: bool(x.any()),
    lambda x: x[0, :2].tolist(),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x.__setitem__(x > 0, x[0, 0]),
    lambda x: x.masked_select(x > 0),
    lambda x: x.unique(),
    lambda x: x.repeat_interleave(x[:, 0].long(), 0),
    lambda x: x[0].cpu(),
    lambda x: torch.tensor([1.0, 2.0], device=x.device),
    lambda x: x.new_tensor((0.0, 0.0, 1.0)),
]
MIXES = [
    lambda x: x + torch.ones(x.shape[1]),
    lambda x: x[torch.arange(2)],
    lambda x: _add_one[(1,)](x, torch.ones(3), 3, BLOCK=4),
]
# Launches and bytes, of ``x [3, 4]``.
COSTS = [
    (lambda x: x * torch.tensor(2.0), 1, 2 * 48),
    (lambda x: torch.ones(3).sum().item(), 0, 0),
    (lambda x: x[0].to("cpu", non_blocking=True), 1, 16),
    (lambda x: x.view(-1)[3:], 0, 0),
    (lambda x: x.add_(x[0]), 1, 2 * 48 + 16),
    (lambda x: x.masked_fill(x > 0, 1.0), 3, 48 + 12 + 48 + 12 + 48),
    (lambda x: x[:, :2].contiguous(), 1, 2 * 24),
    (lambda x: x.gather(1, torch.empty(3, 1, dtype=torch.int64, device="cuda")), 1, 24 + 24),
    (lambda x: x.fill_(0.0), 1, 48),
    (lambda x: torch.cat([x, x]), 1, 48 + 96),
    (lambda x: x.expand(5, 3, 4).clone(), 1, 48 + 240),
    (lambda x: _add_one[(8,)](x, torch.empty_like(x), 12, BLOCK=2), 1, 2 * 48),
    (lambda x: _add_one[(8,)](x, x, 12, BLOCK=2), 1, 48),  # stands for an absent one
]


def test_waits_and_mixed_devices_are_refused_where_they_are_and_the_rest_is_counted():
    with FakeCuda() as cuda:
        for call, count, moved in COSTS:
            x = torch.empty(3, 4, device="cuda")
            with cuda.count() as counter:
                call(x)
            launches = counter.launches
            assert sum(launch.count for launch in launches) == count
            assert sum(launch.bytes for launch in launches) == moved
        for mistakes, what in ((WAITS, "waits"), (MIXES, "mixes devices")):
            for mistake in mistakes:
                refused = pytest.raises(RefusedError, match=rf"{what} at test_counter\.py:\d+")
                with cuda.count(), refused:
                    mistake(x)
        with cuda.count():
            x[x > 0] = 1.0  # a scalar of the host waits for nothing
