"""``hyperdflash init``: a drafter from a target's config and hc_head, and nothing else of it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import check_fingerprint, load_config
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config, shape_for
from tests.conftest import EXAMPLE
from tests.unit.shards import split

SAMPLE = EXAMPLE.parent / "deepseek_v4_flash_config"

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
    assert initialise(target_dir, tmp_path / "draft") == 0
    drafter = Drafter.load(tmp_path / "draft")
    config = load_config(tmp_path / "draft")
    check_fingerprint(config, HcHead(*hc_head).fingerprint())
    assert config.mask_token_id == 4
    for part, expected in zip(NAMES, hc_head, strict=True):
        assert torch.equal(getattr(drafter.reducer, part), expected), part
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


def test_sizes_are_options(tmp_path, target_dir):
    options = "--layers 2 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 128"
    more = "--block-size 5 --rope-theta 5e5 --seed 3"
    assert initialise(target_dir, tmp_path / "draft", *options.split(), *more.split()) == 0
    raw = Drafter.load(tmp_path / "draft").raw
    assert (raw["num_hidden_layers"], raw["num_key_value_heads"], raw["head_dim"]) == (2, 1, 32)
    assert (raw["block_size"], raw["rope_theta"], raw["intermediate_size"]) == (5, 5e5, 128)


# Published dimensions: hidden size, layers, context, and what follows from them.
FLASH, PRO = (4096, 43, 1 << 20), (7168, 61, 1 << 20)


@pytest.mark.parametrize(
    "dimensions, expected",
    [
        (FLASH, DrafterShape(5, 32, 8, 128, 12288, window=2048, dependency_rank=256)),
        (PRO, DrafterShape(5, 56, 8, 128, 21504, window=2048, dependency_rank=256)),
        ((2560, 12, 2049), DrafterShape(4, 20, 4, 128, 7680, window=2048, dependency_rank=256)),
        ((256, 8, 2048), DrafterShape(3, 4, 2, 64, 768, dependency_rank=128)),
        ((32, 2, 128), DrafterShape(1, 1, 1, 64, 96, dependency_rank=16)),
    ],
)
def test_the_default_shape_follows_the_target(dimensions, expected):
    d, layers, context = dimensions
    facts = TargetFacts("any", d, 1000, layers, 4, 1e-6, 1e-6, context)
    assert shape_for(facts) == expected


def test_the_sample_is_what_init_makes_for_v4_flash():
    raw = json.loads((SAMPLE / "drafter" / "config.json").read_text())
    target = json.loads((SAMPLE / "target" / "config.json").read_text())
    facts = TargetFacts.from_config(target)
    made = draft_config(facts, None, shape_for(facts), raw["dflash_config"]["mask_token_id"])
    made["hyperdflash_config"]["target"]["hc_head_fingerprint"] = "0" * 16
    assert {k: v for k, v in raw.items() if k != "_note"} == made


def test_the_default_of_the_tiny_target_is_the_committed_drafters_shape(
    tmp_path, target_dir, capsys
):
    """Found as: a drafter for DeepSeek-V4-Flash of 3 layers and 4 heads of 64."""
    assert initialise(target_dir, tmp_path / "draft") == 0
    said = capsys.readouterr().out
    for line in ("3, 4 heads of 64, 2 K/V heads, MLP 768", "7 rows, window none", "rank 128, 64"):
        assert line in said
    made, committed = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "draft", EXAMPLE / "drafter")
    )
    assert made == committed


def test_a_window_is_in_the_config(tmp_path, target_dir, capsys):
    assert initialise(target_dir, tmp_path / "draft", "--window", "64") == 0
    assert load_config(tmp_path / "draft").window == 64
    for all_of_it in ("0", "none"):  # the second is what init prints
        assert initialise(target_dir, tmp_path / "all", "--window", all_of_it) == 0
    assert load_config(tmp_path / "all").window is None
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


def test_bad_targets_say_what_is_wrong(tmp_path, target_dir, hc_head, capsys):
    whole = dict(zip(NAMES.values(), hc_head, strict=True))
    half = {name: whole[name] for name in list(whole)[:2]}
    wide = whole | {NAMES["fn"]: torch.zeros(4, 512)}
    integer = whole | {NAMES["base"]: torch.zeros(4, dtype=torch.int64)}
    cases = [
        (half, {}, "but not hc_head_scale; its checkpoint is incomplete"),
        (wide, {}, r"has shape \(4, 512\); its config.json .* asks for \(4, 1024\)"),
        (integer, {}, "hc_base in one of F32, F16, BF16, found I64"),
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
    assert "is damaged, cut short" in capsys.readouterr().err
    shard.write_bytes(b"not safetensors at all")
    assert initialise(target, tmp_path / "draft", "--mask-token-id", "4") == 2
    assert "is damaged, cut short" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_bad_options_say_what_is_wrong(tmp_path, target_dir, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (["--heads", "5", "--kv-heads", "2"], "must be a multiple of --kv-heads"),
        (["--head-dim", "33"], "must be even"),
        (["--block-size", "1"], "block_size must be"),
        (["--mask-token-id", "5000"], "outside the vocabulary"),
        (["--out", str(tmp_path / "full")], "expected a new or empty folder"),
        (["--target", str(tmp_path / "nowhere")], "neither a folder nor a hub id"),
        (["--out", str(target_dir)], "is the target "),
        (["--out", str(target_dir / "draft")], "lies inside the target"),
    ]
    for options, message in cases:
        assert initialise(target_dir, tmp_path / "draft", *options) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("option, value, least", [("layers", 0, 1), ("dependency-rank", -1, 0)])
def test_a_size_that_is_none_is_one_line(tmp_path, target_dir, capsys, option, value, least):
    with pytest.raises(SystemExit, match="2"):
        initialise(target_dir, tmp_path / "draft", f"--{option}", str(value))
    error = capsys.readouterr().err
    assert f"--{option}: must be at least {least}, found {value}" in error
    assert error.count("\n") == 1


def test_a_repeated_init_is_the_same_and_another_is_refused(tmp_path, target_dir, capsys):
    assert initialise(target_dir, tmp_path / "draft") == 0
    weights = tmp_path / "draft" / "model.safetensors"
    first = weights.read_bytes()
    weights.unlink()  # as a full disk would leave it
    assert initialise(target_dir, tmp_path / "draft") == 0
    assert weights.read_bytes() == first
    assert initialise(target_dir, tmp_path / "draft", "--seed", "1") == 2
    assert "other settings: seed was 0, now 1" in capsys.readouterr().err
    assert weights.read_bytes() == first


def test_files_have_the_umasks_mode(tmp_path, target_dir):
    before = os.umask(0o022)
    try:
        assert initialise(target_dir, tmp_path / "draft") == 0
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "draft").iterdir()}
    assert set(modes.values()) == {0o644}, modes


def test_a_target_without_config_is_named_with_what_to_do(tmp_path, capsys):
    (tmp_path / "target").mkdir()
    assert initialise(tmp_path / "target", tmp_path / "draft") == 2
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert f"target {tmp_path / 'target'} has no config.json" in message
    assert "expected a target checkpoint" in message
    (tmp_path / "target" / "config.json").write_text("{")
    assert initialise(tmp_path / "target", tmp_path / "draft") == 2
    assert "config.json is not JSON" in capsys.readouterr().err


def test_a_full_disk_is_one_line_with_the_path(tmp_path, target_dir, capsys):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert initialise(target_dir, tmp_path / "draft") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert f"cannot write {tmp_path / 'draft' / 'model.safetensors'}: " in message
    assert "Free space" in message
    assert not list((tmp_path / "draft").glob("*.safetensors*"))
    assert initialise(target_dir, tmp_path / "draft") == 0


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


def test_of_a_hub_id_only_the_bytes_of_the_gate_are_read(
    tmp_path, target_dir, hc_head, monkeypatch
):
    """A folder in the place of the hub; no network in tests."""
    import huggingface_hub

    root, read, downloaded = tmp_path / "owner" / "name@main", [], []
    shutil.copytree(target_dir, root)
    split(root)

    class Counting(io.FileIO):
        def readinto(self, buffer):
            read.append(super().readinto(buffer))
            return read[-1]

    def path_of(repo: str, filename: str, revision: str) -> Path:
        return tmp_path / f"{repo}@{revision}" / filename

    def download(repo: str, file: str, revision: str) -> str:
        downloaded.append(file)
        return str(path_of(repo, file, revision).resolve(strict=True))

    def metadata(*place, **more):
        return huggingface_hub.parse_local_safetensors_file_metadata(path_of(*place, **more))

    filesystem = SimpleNamespace(
        open=lambda path, mode: io.BufferedReader(Counting(tmp_path / path), 1024)
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: filesystem)
    options = ["--revision", "main", "--mask-token-id", "4"]
    assert initialise("owner/name", tmp_path / "draft", *options) == 0
    reducer = Drafter.load(tmp_path / "draft").reducer
    for part, expected in zip(NAMES, hc_head, strict=True):
        assert torch.equal(getattr(reducer, part), expected), part
    assert set(downloaded) == {"config.json", "model.safetensors.index.json"}
    smallest = min(path.stat().st_size for path in root.glob("*.safetensors"))
    assert 16_000 < sum(read) < 30_000 < smallest
    assert initialise("owner/gone", tmp_path / "other", *options) == 2


def test_a_head_and_a_causal_block_are_made(tmp_path, target_dir, capsys):
    options = ("--dependency-rank", "16", "--dependency-top-k", "20", "--causal")
    assert initialise(target_dir, tmp_path / "draft", *options) == 0
    assert initialise(target_dir, tmp_path / "plain", "--dependency-rank", "0") == 0
    config, plain = (load_config(tmp_path / name) for name in ("draft", "plain"))
    assert (config.dependency.rank, config.dependency.top_k) == (16, 20)
    assert config.causal and not plain.causal and plain.dependency is None
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert raw["layer_types"] == ["full_attention"] * 3 and raw["is_causal"] is True
    assert "head    rank 16, 20 candidates" in capsys.readouterr().out
    # A seed's other weights are the same with and without a head.
    drafters = [Drafter.load(tmp_path / name).state_dict() for name in ("draft", "plain")]
    assert all(torch.equal(drafters[0][name], value) for name, value in drafters[1].items())
    assert drafters[0]["dependency.successor"].abs().max() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dependency-rank", "0", "--dependency-top-k", "8"), "found --dependency-rank 0. Drop"),
        (
            ("--dependency-rank", "4", "--dependency-top-k", "5000"),
            "at most the vocabulary of 1363",
        ),
        (("--dependency-rank", "0", "--dependency-form", "product"), "need a dependency head"),
    ],
)
def test_options_of_a_head_that_cannot_work_are_one_line(
    tmp_path, target_dir, capsys, options, message
):
    assert initialise(target_dir, tmp_path / "draft", *options) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(message, error) and "\n" not in error
    assert not (tmp_path / "draft" / "config.json").exists()
