"""The counter refuses what is planted, and says where."""

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


def test_waits_and_mixed_devices_are_refused_where_they_are():
    with FakeCuda() as cuda:
        x = torch.empty(3, 4, device="cuda")
        for mistakes, what in ((WAITS, "waits"), (MIXES, "mixes devices")):
            for mistake in mistakes:
                refused = pytest.raises(RefusedError, match=rf"{what} at test_counter\.py:\d+")
                with cuda.count(), refused:
                    mistake(x)
        with cuda.count():
            x[x > 0] = 1.0  # a scalar of the host waits for nothing
