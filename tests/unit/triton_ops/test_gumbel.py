"""The hashed noise is SGLang's, bit for bit, and draws follow their weights."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from scipy import stats

from tests.unit.statistics_help import chi_square_p_value
from triton_ops.gumbel import (
    BLOCK_STREAM,
    COIN_STREAM,
    RESIDUAL_STREAM,
    block_seeds,
    coins,
    gumbel_argmax,
    gumbel_noise,
    hash32,
)

SEEDS = torch.tensor([0, 1, 42, -1, -(2**63), 2**63 - 1, 2**32, 0x123456789ABCDEF])
POSITIONS = torch.tensor([0, 1, 7, 131071, 2**31 - 1, 5, 1_048_575, 3])


@pytest.fixture(scope="module")
def sglang_hash():
    """SGLang's own Triton kernel, in Triton's interpreter."""
    import sglang

    path = Path(sglang.__path__[0]) / "kernels/ops/sampling/murmur_hash.py"
    spec = importlib.util.spec_from_file_location("interpreted_murmur_hash", path)
    module = importlib.util.module_from_spec(spec)

    def run(seeds, positions, ids):
        hashed = torch.empty(len(seeds), len(ids), dtype=torch.uint32)
        grid = (len(seeds), -(-len(ids) // 1024))
        module.murmur_hash32_kernel[grid](
            seeds.to(torch.uint64), positions, ids, hashed, *hashed.shape, BLOCK_SIZE=1024
        )
        return hashed

    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        spec.loader.exec_module(module)
        yield run


def test_the_hash_is_that_of_sglangs_kernel(sglang_hash):
    ids = torch.cat([torch.arange(1500), torch.tensor([129_279, 2**31 - 1])])
    found, expected = hash32(SEEDS, POSITIONS, ids), sglang_hash(SEEDS, POSITIONS, ids)
    assert torch.equal(found, expected.long())
    assert int(found.min()) >= 0 and int(found.max()) < 2**32


def test_draws_are_those_of_sglangs_seeded_sampler(sglang_hash):
    from sglang.srt.layers import sampler

    probs = torch.randn(8, 700, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs[:, 5::7] = 0.0
    original = sampler.multinomial_with_seed._torchdynamo_orig_callable
    with mock.patch.object(sampler, "murmur_hash32", sglang_hash):
        expected = original(probs.log(), SEEDS, POSITIONS)
    assert torch.equal(gumbel_argmax(probs, SEEDS, POSITIONS), expected.squeeze(1))


def test_the_noise_at_the_hashs_ends_is_finite():
    with mock.patch("triton_ops.gumbel.hash32") as hashed:
        hashed.return_value = torch.tensor([[0, 1, 2**32 - 2, 2**32 - 1]])
        noise = gumbel_noise(SEEDS[:1], POSITIONS[:1], torch.arange(4))
    assert torch.isfinite(noise).all()
    assert noise[0].tolist() == sorted(noise[0].tolist())
    assert float(noise[0, 3]) == pytest.approx(32 * 0.6931471805599453)


def test_ids_of_every_row_give_the_same_noise_as_shared_ones():
    ids = torch.tensor([5, 900, 3])
    each = gumbel_noise(SEEDS, POSITIONS, ids.expand(len(SEEDS), 3))
    assert torch.equal(each, gumbel_noise(SEEDS, POSITIONS, ids))


def test_draws_follow_their_weights_over_seeds_and_over_positions():
    weights = torch.tensor([[4.0, 0.0, 1.0, 2.0, 1.0]])
    count, distribution = 40_000, weights[0] / weights.sum()
    step = torch.arange(count)
    for seeds, positions in ((step, torch.full_like(step, 3)), (torch.full_like(step, 3), step)):
        draws = gumbel_argmax(weights.expand(count, -1), seeds, positions)
        assert chi_square_p_value(draws, distribution) > 1e-4


def test_neighbouring_positions_are_independent():
    weights = torch.full((40_000, 4), 0.25)
    seeds, zero = torch.arange(40_000), torch.zeros(40_000, dtype=torch.long)
    pair = 4 * gumbel_argmax(weights, seeds, zero)
    pair += gumbel_argmax(weights, seeds, zero + 1)
    assert chi_square_p_value(pair, torch.full((16,), 1 / 16)) > 1e-4


def test_coins_are_uniform_and_independent_of_the_draws():
    seeds, positions = torch.arange(40_000), torch.full((40_000,), 11)
    u = coins(seeds, positions)
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    weights = torch.full((40_000, 4), 0.25)
    drawn = gumbel_argmax(weights, seeds, positions)
    residual = gumbel_argmax(weights, seeds ^ RESIDUAL_STREAM, positions)
    cells = (drawn * 4 + residual) * 4 + (u * 4).long()
    assert chi_square_p_value(cells, torch.full((64,), 1 / 64)) > 1e-4
    assert COIN_STREAM != RESIDUAL_STREAM


def test_blocks_of_a_seed_have_noise_of_their_own_unless_it_is_the_client_s():
    count = 40_000
    seeds, start = torch.full((count,), 2**63 - 5), torch.arange(count)
    own = block_seeds(seeds, torch.zeros(count, dtype=torch.bool), start)
    assert len(own.unique()) == count
    assert torch.equal(block_seeds(seeds, torch.ones(count, dtype=torch.bool), start), seeds)
    wrapped = (2**63 - 5 + 3 * BLOCK_STREAM + 2**63) % 2**64 - 2**63
    assert BLOCK_STREAM % 2 == 1 and int(own[2]) == wrapped
    # Two blocks that overlap draw at one position independently.
    weights, position = torch.full((count, 4), 0.25), start + 1
    pair = 4 * gumbel_argmax(weights, own, position)
    pair += gumbel_argmax(weights, block_seeds(seeds, seeds < 0, start - 1), position)
    assert chi_square_p_value(pair, torch.full((16,), 1 / 16)) > 1e-4
