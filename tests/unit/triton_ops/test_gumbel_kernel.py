"""The noise's device functions are the torch ones: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import os
from unittest import mock

import torch
import triton
import triton.language as tl

from triton_ops import gumbel
from triton_ops.gumbel_kernel import block_seed, coin, divided, noise, row_hash

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
N = tl.constexpr(64)

# As conftest imports the kernels: Triton reads the variable while it decorates.
with mock.patch.dict(os.environ, {} if CUDA else {"TRITON_INTERPRET": "1"}):

    @triton.jit
    def _noise_kernel(hashed_ptr, ids_ptr, out_ptr):
        at = tl.arange(0, N)
        hashed = tl.load(hashed_ptr + at).to(tl.uint32)
        tl.store(out_ptr + at, noise(hashed, tl.load(ids_ptr + at).to(tl.uint32)))

    @triton.jit
    def _rows_kernel(seeds_ptr, seeded_ptr, positions_ptr, hashes_ptr, coins_ptr, blocks_ptr):
        """Blocks of all but the first, which is a scalar."""
        at = tl.arange(0, N)
        seed, position = tl.load(seeds_ptr + at), tl.load(positions_ptr + at)
        tl.store(hashes_ptr + at, row_hash(seed, position).to(tl.int64))
        tl.store(coins_ptr + at, coin(seed, position))
        tl.store(blocks_ptr + at, block_seed(seed, tl.load(seeded_ptr + at), position))
        seed, position = tl.load(seeds_ptr), tl.load(positions_ptr)
        tl.store(hashes_ptr + N, row_hash(seed, position).to(tl.int64))
        tl.store(coins_ptr + N, coin(seed, position))
        tl.store(blocks_ptr + N, block_seed(seed, tl.load(seeded_ptr), position))

    @triton.jit
    def _divided_kernel(x_ptr, t_ptr, out_ptr):
        at = tl.arange(0, N)
        tl.store(out_ptr + at, divided(tl.load(x_ptr + at), tl.load(t_ptr + at)))


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, whether clients gave them, positions."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    seeds[:6] = torch.tensor([-1, 0, 1, -(2**63), 2**63 - 1, 2**32])
    positions = torch.randint(0, 2**31, (64,), generator=generator)
    return seeds.to(DEVICE), torch.arange(64, device=DEVICE) % 2 == 1, positions.to(DEVICE)


def _before(hashed: int, token: int) -> int:
    """The row hash whose hash with ``token`` is ``hashed``: the steps of murmur3, backwards."""

    def unmixed(h: int, factor: int, shift: int) -> int:
        h = h * pow(factor, -1, 2**32) % 2**32
        return h ^ (h >> shift) ^ (h >> 2 * shift)

    h = hashed ^ (hashed >> 16)
    h = unmixed(unmixed(h, 0xC2B2AE35, 13), 0x85EBCA6B, 16) ^ 16
    h = (h - 0xE6546B64) * pow(5, -1, 2**32) % 2**32
    h = (h >> 13 | h << 19) % 2**32
    return h ^ int(gumbel._scramble(torch.tensor(token)))


def test_the_noise_is_finite_and_the_same_at_the_hashs_ends():
    hashes = [0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1] + [k * 0x9E3779B1 % 2**32 for k in range(58)]
    ids = torch.arange(64) * 2021
    rows = [_before(h, token) for h, token in zip(hashes, ids.tolist(), strict=True)]
    found = torch.empty(64, dtype=torch.float64, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor(rows, device=DEVICE), ids.to(DEVICE), found)
    with mock.patch("triton_ops.gumbel.hash32", return_value=torch.tensor(hashes)):
        expected = gumbel.gumbel_noise(ids, ids, ids)
    assert found.isfinite().all()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-15, atol=1e-15)


def test_hashes_coins_and_block_seeds_of_blocks_and_of_scalars():
    seeds, seeded, positions = rows()
    hashes = torch.empty(65, dtype=torch.int64, device=DEVICE)
    coins, blocks = torch.empty_like(hashes, dtype=torch.float64), torch.empty_like(hashes)
    _rows_kernel[(1,)](seeds, seeded, positions, hashes, coins, blocks)
    assert torch.equal(coins[:64], gumbel.coins(seeds, positions))
    assert torch.equal(blocks[:64], gumbel.block_seeds(seeds, seeded, positions))
    for found in (hashes, coins, blocks):
        assert found[64] == found[0]
    ids = torch.full((64,), 77, device=DEVICE)
    noise = torch.empty_like(coins[:64])
    _noise_kernel[(1,)](hashes, ids, noise)
    expected = gumbel.gumbel_noise(seeds, positions, ids[:1]).squeeze(1)
    torch.testing.assert_close(noise, expected, rtol=1e-15, atol=1e-15)


def test_quotients_are_rounded_as_torchs():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).mul(20)
    x[:4] = torch.tensor([float("inf"), float("-inf"), 0.0, 1e-42])
    for t in (1e-5, 0.3, 0.7, 1.0, 1.1, 9.999):
        found, divisor = torch.empty(64, device=DEVICE), torch.full((64,), t, device=DEVICE)
        _divided_kernel[(1,)](x.to(DEVICE), divisor, found)
        assert torch.equal(found.cpu(), x / t)
