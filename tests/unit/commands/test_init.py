"""``hyperdflash init``: a drafter from a target's config and hc_head, and nothing else of it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import check_fingerprint, load_config
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.training.drafter import Drafter

NAMES = {part: f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}


@pytest.fixture(scope="module")
def hc_head(target_dir):
    weights = load_file(target_dir / "model.safetensors")
    return tuple(weights[NAMES[part]].float() for part in NAMES)


def target_of(folder, target_dir, tensors, *, extra=None, config=None):
    """A target folder that has an index, only the shard of ``tensors``, and a config."""
    folder.mkdir()
    fields = json.loads((target_dir / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    where = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    where |= dict.fromkeys(
        extra or ["model.embed_tokens.weight"], "model-00001-of-00002.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def initialise(target, out, *options: str) -> int:
    return main(["init", "--target", str(target), "--out", str(out), *options])


def test_the_gate_is_the_targets_own_collapse(tmp_path, target_dir, hc_head, capsys):
    assert initialise(target_dir, tmp_path / "draft", "--no-path-norm") == 0
    drafter = Drafter.load(tmp_path / "draft")
    config = load_config(tmp_path / "draft")
    check_fingerprint(config, HcHead(*hc_head).fingerprint())
    assert config.mask_token_id == 4
    hidden = torch.randn(5, 4 * 256) * 10
    expected = HcHead(*hc_head).collapse(hidden, rms_eps=1e-6, hc_eps=1e-6)
    torch.testing.assert_close(drafter.reducer(hidden, None), expected, rtol=1e-5, atol=1e-4)
    assert "inherited exactly" in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["transformers", "deepseek"])
def test_reads_the_shard_with_the_hc_head_and_no_other(tmp_path, target_dir, hc_head, scheme):
    names = NAMES.values() if scheme == "transformers" else [f"hc_head_{part}" for part in NAMES]
    tensors = dict(zip(names, hc_head, strict=True))
    mtp = ["mtp.0.hc_head_fn", "mtp.0.hc_head_base", "mtp.0.hc_head_scale"]
    target = target_of(tmp_path / "target", target_dir, tensors, extra=mtp)
    assert initialise(target, tmp_path / "draft", "--mask-token-id", "4") == 0
    drafter = Drafter.load(tmp_path / "draft")
    assert torch.equal(drafter.reducer.fn, hc_head[0])
    assert torch.equal(drafter.reducer.base, hc_head[1])


def test_reads_only_the_bytes_it_needs(target_dir, hc_head, monkeypatch):
    files = TargetFiles(str(target_dir))
    read = []

    class Counting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, at):
            return self.file.seek(at)

        def read(self, n=-1):
            data = self.file.read(n)
            read.append(len(data))
            return data

    plain = files._open
    monkeypatch.setattr(files, "_open", lambda name: Counting(plain(name)))
    found = files.hc_head(4, 256)
    assert all(torch.equal(a, b) for a, b in zip(found, hc_head, strict=True))
    assert sum(read) < 200_000 < (target_dir / "model.safetensors").stat().st_size


def test_sizes_are_options(tmp_path, target_dir):
    options = "--layers 2 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 128"
    more = "--block-size 5 --rope-theta 5e5 --seed 3"
    assert initialise(target_dir, tmp_path / "draft", *options.split(), *more.split()) == 0
    raw = Drafter.load(tmp_path / "draft").raw
    assert (raw["num_hidden_layers"], raw["num_key_value_heads"], raw["head_dim"]) == (2, 1, 32)
    assert (raw["block_size"], raw["rope_theta"], raw["intermediate_size"]) == (5, 5e5, 128)


def test_a_window_is_in_the_config(tmp_path, target_dir, capsys):
    assert initialise(target_dir, tmp_path / "draft", "--window", "64") == 0
    assert load_config(tmp_path / "draft").window == 64
    assert initialise(target_dir, tmp_path / "other", "--window", "6") == 2
    assert "window must be at least the block size 7" in capsys.readouterr().err


def test_a_target_without_hc_head_needs_fc(tmp_path, target_dir, capsys):
    target = target_of(tmp_path / "target", target_dir, {"norm.weight": torch.ones(256)})
    assert initialise(target, tmp_path / "draft", "--mask-token-id", "4") == 2
    assert "has no hc_head to inherit a gate from. Use --reducer fc" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()
    assert initialise(target, tmp_path / "draft", "--mask-token-id", "4", "--reducer", "fc") == 0
    assert "nothing is inherited" in capsys.readouterr().out
    assert Drafter.load(tmp_path / "draft").fc.weight.shape == (256, 1024)


def test_a_random_gate_inherits_nothing(tmp_path, target_dir, hc_head, capsys):
    assert initialise(target_dir, tmp_path / "draft", "--gate", "random") == 0
    assert "hc_gate at random: nothing is inherited" in capsys.readouterr().out
    reducer = Drafter.load(tmp_path / "draft").reducer
    assert (reducer.fn - hc_head[0]).norm() > 0.5 * hc_head[0].norm()
    hidden = torch.randn(500, 1024) * 7
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True))
    assert 0.8 < float((normed @ reducer.fn.T).std()) < 1.2


def test_bad_targets_say_what_is_wrong(tmp_path, target_dir, hc_head, capsys):
    whole = dict(zip(NAMES.values(), hc_head, strict=True))
    half = {name: whole[name] for name in list(whole)[:2]}
    wide = whole | {NAMES["fn"]: torch.zeros(4, 512)}
    integer = whole | {NAMES["base"]: torch.zeros(4, dtype=torch.int64)}
    cases = [
        (half, {}, "but not hc_head_scale; its checkpoint is incomplete"),
        (wide, {}, r"has shape \(4, 512\); its config.json .* asks for \(4, 1024\)"),
        (integer, {}, "hc_base is I64; expected one of F32, F16, BF16"),
        (whole, {"hc_mult": None}, "lacks hc_mult. HYPERDFLASH needs a target with hyper-conn"),
        (whole, {"architectures": []}, "lacks architectures"),
    ]
    for i, (tensors, config, message) in enumerate(cases):
        target = target_of(tmp_path / f"target{i}", target_dir, tensors, config=config)
        assert initialise(target, tmp_path / "draft", "--mask-token-id", "4") == 2
        assert re.search(message, capsys.readouterr().err), message
    target = target_of(tmp_path / "cut", target_dir, whole)
    shard = target / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-20])
    assert initialise(target, tmp_path / "draft", "--mask-token-id", "4") == 2
    assert "is cut short inside tensor" in capsys.readouterr().err
    shard.write_bytes(b"not safetensors at all")
    assert initialise(target, tmp_path / "draft", "--mask-token-id", "4") == 2
    assert "is not a safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_bad_options_say_what_is_wrong(tmp_path, target_dir, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (["--heads", "5", "--kv-heads", "2"], "must be a multiple of --kv-heads"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--head-dim", "33"], "must be even"),
        (["--block-size", "1"], "block_size must be at least 2"),
        (["--mask-token-id", "5000"], "outside the vocabulary"),
        (["--out", str(tmp_path / "full")], "is not empty"),
        (["--target", str(tmp_path / "nowhere")], "neither a folder nor a hub id"),
    ]
    for options, message in cases:
        assert initialise(target_dir, tmp_path / "draft", *options) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "draft").exists()


def test_a_tokenizer_without_mask_token_needs_the_option(tmp_path, target_dir, hc_head, capsys):
    target = target_of(
        tmp_path / "target", target_dir, dict(zip(NAMES.values(), hc_head, strict=True))
    )
    shutil.copy(target_dir / "tokenizer.json", target)
    config = json.loads((target_dir / "tokenizer_config.json").read_text())
    config.pop("mask_token")
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    assert initialise(target, tmp_path / "draft") == 2
    assert "has no mask token; pass --mask-token-id" in capsys.readouterr().err


def test_a_hub_id_is_read_through_the_hub_filesystem(tmp_path, target_dir, monkeypatch):
    """The same code path as a folder, on another filesystem; no network in tests."""
    import fsspec
    import huggingface_hub

    root = tmp_path / "owner" / "name@main"
    root.parent.mkdir()
    shutil.copytree(target_dir, root)

    def filesystem():
        return fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))

    monkeypatch.setattr(huggingface_hub, "HfFileSystem", filesystem)
    options = ["--revision", "main", "--mask-token-id", "4"]
    assert initialise("owner/name", tmp_path / "draft", *options) == 0
    assert initialise("owner/gone", tmp_path / "other", *options) == 2
