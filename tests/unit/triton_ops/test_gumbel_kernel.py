"""Hashed noise: SGLang's, bit for bit; draws are independent; kernels have the same."""

import os
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from tests.unit.statistics_help import chi_square_p_value
from tests.unit.triton_ops.gate_help import DEVICE, sglang_kernels
from triton_ops import gumbel
from triton_ops.gumbel import RESIDUAL_STREAM, block_seeds, coins, gumbel_argmax, gumbel_noise
from triton_ops.gumbel_kernel import coin, noise

SEEDS = torch.tensor([0, 1, 42, -1, -(2**63), 2**63 - 1, 2**32, 0x123456789ABCDEF])
POSITIONS = torch.tensor([0, 1, 7, 131071, 2**31 - 1, 5, 1_048_575, 3])
MANY = 40_000
EQUAL, STEP, ZERO = torch.full((MANY, 4), 0.25), torch.arange(MANY), torch.zeros(MANY).long()


def uniform(cells: torch.Tensor, count: int) -> bool:
    return chi_square_p_value(cells, torch.full((count,), 1 / count)) > 1e-4


@pytest.mark.skipif(DEVICE == "cuda", reason="SGLang's kernel is interpreted")
def test_hashes_and_draws_are_those_of_sglangs_seeded_sampler():
    from sglang.srt.layers import sampler

    def sglang_hash(seeds, positions, ids):
        hashed = torch.empty(len(seeds), len(ids), dtype=torch.uint32)
        given = seeds.to(torch.uint64), positions, ids, hashed, *hashed.shape
        kernel[len(seeds), -(-len(ids) // 1024)](*given, BLOCK_SIZE=1024)
        return hashed

    ids = torch.cat([torch.arange(1500), torch.tensor([129_279, 2**31 - 1])])
    probs = torch.randn(8, 700, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs[:, 5::7] = 0.0
    kernel = sglang_kernels("sampling.murmur_hash")["murmur_hash32_kernel"]
    with mock.patch.object(sampler, "murmur_hash32", sglang_hash):
        expected = sglang_hash(SEEDS, POSITIONS, ids).long()
        draw = sampler.multinomial_with_seed._torchdynamo_orig_callable
        drawn = draw(probs.log(), SEEDS, POSITIONS).squeeze(1)
    hashed = gumbel.hash32(SEEDS, POSITIONS, ids)
    assert torch.equal(hashed, expected)
    assert int(hashed.min()) >= 0 and int(hashed.max()) < 2**32
    assert torch.equal(gumbel_argmax(probs, SEEDS, POSITIONS), drawn)
    each = gumbel_noise(SEEDS, POSITIONS, ids.expand(8, -1))  # ids of every row's own
    assert torch.equal(each, gumbel_noise(SEEDS, POSITIONS, ids))


def test_neighbouring_positions_coins_and_residual_draws_are_independent():
    u, drawn = coins(STEP, ZERO + 11), gumbel_argmax(EQUAL, STEP, ZERO + 11)
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    residual = gumbel_argmax(EQUAL, STEP ^ RESIDUAL_STREAM, ZERO + 11)
    assert uniform((drawn * 4 + residual) * 4 + (u * 4).long(), 64)
    assert uniform(4 * drawn + gumbel_argmax(EQUAL, STEP, ZERO + 12), 16)


def test_blocks_of_a_seed_have_noise_of_their_own_unless_it_is_the_clients():
    seeds, seeded = torch.full((MANY,), 2**63 - 5), torch.ones(MANY, dtype=torch.bool)
    blocks = block_seeds(seeds, ~seeded, STEP)
    assert len(blocks.unique()) == MANY
    assert torch.equal(block_seeds(seeds, seeded, STEP), seeds)
    wrapped = (2**63 - 5 + 3 * gumbel.BLOCK_STREAM + 2**63) % 2**64 - 2**63
    assert gumbel.BLOCK_STREAM % 2 == 1 and int(blocks[2]) == wrapped
    # Two blocks that overlap draw at one position independently.
    earlier = gumbel_argmax(EQUAL, block_seeds(seeds, ~seeded, STEP - 1), STEP + 1)
    assert uniform(4 * gumbel_argmax(EQUAL, blocks, STEP + 1) + earlier, 16)


N = tl.constexpr(8)
# Hashes of token 7, and what they are made of: of a row's seed and position.
HASHES = torch.tensor([0, 1, 2, 2**16, 2**31, 0x9E3779B1, 2**32 - 2, 2**32 - 1])
BEFORE = [0xBCBF37F3, 0x8B9CB3C3, 0x30549839, 0x56F20243]
BEFORE += [0x5DBD9F96, 0x2B35001B, 0x7317ED20, 0x0444FF23]

# As conftest imports the kernels: Triton reads the variable while it decorates.
with mock.patch.dict(os.environ, {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}):

    @triton.jit
    def _drawn_kernel(hashed_ptr, ids_ptr, seeds_ptr, positions_ptr, noise_ptr, coins_ptr):
        row = tl.arange(0, N)
        hashed = tl.load(hashed_ptr + row).to(tl.uint32)
        tl.store(noise_ptr + row, noise(hashed, tl.load(ids_ptr + row).to(tl.uint32)))
        coins = coin(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        tl.store(coins_ptr + row, coins)


def test_noise_is_finite_at_the_hashs_ends_and_the_kernels_as_are_the_coins():
    ids, (result, drawn) = torch.full((8,), 7), torch.empty(2, 8, dtype=torch.float64).to(DEVICE)
    given = [t.to(DEVICE) for t in (torch.tensor(BEFORE), ids, SEEDS, POSITIONS)]
    _drawn_kernel[(1,)](*given, result, drawn)
    assert torch.equal(drawn.cpu(), coins(SEEDS, POSITIONS))
    with mock.patch.object(gumbel, "hash32", return_value=HASHES):
        expected = gumbel_noise(ids, ids, ids)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-15, atol=1e-15)
    assert expected.isfinite().all() and expected.tolist() == sorted(expected.tolist())
    assert float(expected[-1]) == pytest.approx(32 * 0.6931471805599453)
