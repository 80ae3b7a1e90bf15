"""States stored in fp8: half of the bytes, near enough, never mixed with others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import NotOurs
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.writer import bytes_of, open_writer
from tests.unit.training.store import small
from tests.unit.training.store.small import D, M

IDENTITY = replace(small.IDENTITY, fp8=True)
SHARD = "one-{:08d}.safetensors"


def write(folder, states, identity=IDENTITY, ranges=small.RANGES) -> None:
    with open_writer(folder, identity, "one", small.KIND, {}) as writer:
        writer.begin(small.DATA)
        for start, end in ranges:
            writer.add(start, small.SAMPLES[start:end], states[start:end])


def uneven(width: int) -> list[torch.Tensor]:
    """States whose rows differ by 2^40 and numbers by 2^20, with rows of zeros."""
    g, found = torch.Generator().manual_seed(0), []
    for sample in small.SAMPLES:
        shape = (len(sample.tokens), width // D)
        rows = torch.randn(*shape, D, generator=g)
        rows *= torch.exp2(20.0 * torch.randn(*shape, 1, generator=g).clamp(-1, 1))
        rows *= torch.exp2(torch.randint(-10, 11, (*shape, D), generator=g).float())
        rows[0, 0] = 0
        found.append(rows.flatten(1).bfloat16())
    return found


def near(found: torch.Tensor, states: torch.Tensor) -> bool:
    """Within half a step of e4m3 under each row's scale, and of bf16."""
    wanted, found = (x.float().unflatten(-1, (-1, D)) for x in (states, found))
    step = wanted.abs().amax(-1, keepdim=True) / 448 * 2**-9
    bound = torch.maximum(wanted.abs() / 16, step / 2) + wanted.abs() / 128
    return bool(((found - wanted).abs() <= bound).all())


def test_every_row_comes_back_in_bf16_within_half_a_step_of_fp8(tmp_path):
    identity = replace(IDENTITY, dtype="float32", layer_ids=(1, 3, 5))
    residual, layers = uneven(M * D), uneven(3 * D)
    write(tmp_path, list(zip(residual, layers, strict=True)), identity)
    source = StoreReader(tmp_path)
    assert small.found(source) == small.EXPECTED
    source.prefetch([3, 0])
    for indices in ([3, 0], [1], [2]):
        states = source.states(indices)
        assert states.residual.dtype == states.layers.dtype == torch.bfloat16
        for row, i in enumerate(indices):
            n = len(small.SAMPLES[i].tokens)
            assert near(states.residual[row, :n], residual[i])
            assert near(states.layers[row, :n], layers[i])
            assert not torch.equal(states.residual[row, :n], residual[i])
            assert not states.residual[row, n:].any() and not states.layers[row, n:].any()
            assert not states.residual[row, 0, :D].any()


def test_a_shard_is_half_as_large_and_any_reader_of_safetensors_reads_it(tmp_path):
    large = {"hidden_size": 512}
    rows = [torch.randn(len(s.tokens), M * 512).bfloat16() for s in small.SAMPLES]
    sizes = {}
    for name, identity in (("bf16", small.IDENTITY), ("fp8", IDENTITY)):
        write(tmp_path / name, [(x,) for x in rows], replace(identity, **large))
        path = tmp_path / name / "shards" / SHARD.format(0)
        sizes[name] = path.stat().st_size
        tensors = load_file(path)
        expected = sum(bytes_of(s, replace(identity, **large)) for s in small.SAMPLES[:2])
        assert sum(x.nbytes for x in tensors.values()) == expected
    assert sizes["fp8"] < 0.52 * sizes["bf16"]
    values, scales = tensors["residual"], tensors["residual_scale"]
    assert values.dtype == torch.float8_e4m3fn and scales.shape == values.shape[:2]
    assert values.float().abs().amax(-1).eq(448).all()
    found = StoreReader(tmp_path / "fp8").states([1]).residual[0]
    n = len(small.SAMPLES[0].tokens)
    assert torch.equal((values[n:].float() * scales[n:, :, None]).flatten(1).bfloat16(), found)


def test_it_resumes_and_its_damage_is_found(tmp_path):
    states = [(small.residual(s),) for s in small.SAMPLES]
    write(tmp_path, states, ranges=[(2, 4)])
    with open_writer(tmp_path, IDENTITY, "one", small.KIND, {}) as writer:
        assert writer.missing(small.RANGES) == [(0, 2)]
    write(tmp_path, states, ranges=[(0, 2)])
    assert near(StoreReader(tmp_path).states([0]).residual[0], states[0][0])
    path = tmp_path / "shards" / SHARD.format(2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(HyperDFlashConfigError, match="is corrupt"):
        StoreReader(tmp_path).states([2])


@pytest.mark.parametrize("first", [True, False])
def test_a_store_never_mixes_fp8_with_others(tmp_path, first):
    states = [(small.residual(s),) for s in small.SAMPLES]
    write(tmp_path, states, replace(IDENTITY, fp8=first), [(0, 2)])
    expected = f"fp8 was {str(first).lower()}, now {str(not first).lower()}"
    with pytest.raises(NotOurs, match=expected):
        write(tmp_path, states, replace(IDENTITY, fp8=not first), [(2, 4)])
