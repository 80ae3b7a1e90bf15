"""``hyperdflash init``: a drafter from a target's config and hc_head, and nothing else of it."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import check_fingerprint, load_config
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config, shape_for
from tests.conftest import EXAMPLE
from tests.unit.commands.builders import SAMPLE, initialise
from tests.unit.shards import split
from tests.unit.training.store.small import files_of

NAMES = {part: f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}
MASK = ("--mask-token-id", "4")
INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def hc_head(target_dir):
    weights = load_file(target_dir / "model.safetensors")
    return tuple(weights[NAMES[part]].float() for part in NAMES)


def target_of(folder, target_dir, tensors, others=("model.embed_tokens.weight",)):
    """A target folder that has an index, only the shard of ``tensors``, and a config."""
    folder.mkdir()
    shutil.copy(target_dir / "config.json", folder)
    save_file(tensors, folder / SHARD)
    where = dict.fromkeys(tensors, SHARD) | dict.fromkeys(others, SHARD.replace("2", "1", 1))
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


def raw_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_the_gate_is_the_target_s_and_the_shape_the_committed_one_s(tmp_path, target_dir, hc_head):
    """Made again it is the same, also where its weights were lost."""
    draft = tmp_path / "draft"
    assert initialise(target_dir, draft) == 0
    check_fingerprint(load_config(draft), HcHead(*hc_head).fingerprint())
    reducer = Drafter.load(draft).reducer
    assert all(map(torch.equal, [getattr(reducer, part) for part in NAMES], hc_head))
    assert raw_of(draft) == raw_of(EXAMPLE / "drafter")
    weights = draft / "model.safetensors"
    first = weights.read_bytes()
    weights.unlink()  # as a full disk would leave it
    assert initialise(target_dir, draft) == 0 and weights.read_bytes() == first


def test_only_the_shard_with_the_hc_head_is_read(tmp_path, target_dir, hc_head):
    """Named as DeepSeek does, which has others in an MTP layer."""
    names = [f"hc_head_{part}" for part in NAMES]
    tensors = dict(zip(names, hc_head, strict=True))
    target = target_of(tmp_path / "target", target_dir, tensors, [f"mtp.0.{n}" for n in names])
    assert initialise(target, tmp_path / "draft", *MASK) == 0
    reducer = Drafter.load(tmp_path / "draft").reducer
    assert all(map(torch.equal, [getattr(reducer, part) for part in NAMES], hc_head))


def test_an_hc_head_that_is_not_whole_is_refused(tmp_path, target_dir, hc_head, refused):
    """A target without one needs ``fc``."""
    whole = dict(zip(NAMES.values(), hc_head, strict=True))
    cases = {
        "hc_head_scale": {name: whole[name] for name in list(whole)[:2]},
        "(4, 512)": whole | {NAMES["fn"]: torch.zeros(4, 512)},
        "I64": whole | {NAMES["base"]: torch.zeros(4, dtype=torch.int64)},
        SHARD: whole,
        "--reducer fc": {"norm.weight": torch.ones(256)},
    }
    for named, tensors in cases.items():
        target = target_of(tmp_path / named, target_dir, tensors)
        if named == SHARD:
            (target / SHARD).write_bytes((target / SHARD).read_bytes()[:-20])
        assert named in refused("init", "--target", target, "--out", tmp_path / "draft", *MASK)
        assert not (tmp_path / "draft").exists()
    assert initialise(target, tmp_path / "draft", *MASK, "--reducer", "fc") == 0
    assert Drafter.load(tmp_path / "draft").fc.weight.shape == (256, 1024)


def test_shapes_are_options(tmp_path, target_dir):
    """A seed's other weights are the same with and without a head."""
    sizes = "--layers 2 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 128"
    sizes += " --block-size 5 --rope-theta 5e5 --seed 3"
    head = "--dependency-rank 16 --dependency-top-k 20 --causal --window 64"
    assert initialise(target_dir, tmp_path / "draft", *f"{sizes} {head}".split()) == 0
    for every in ("0", "none"):  # the second is what init prints
        plain = f"{sizes} --dependency-rank 0 --window {every}".split()
        assert initialise(target_dir, tmp_path / "plain", *plain) == 0
    raw = raw_of(tmp_path / "draft")
    assert (raw["num_hidden_layers"], raw["num_key_value_heads"], raw["head_dim"]) == (2, 1, 32)
    assert (raw["block_size"], raw["rope_theta"], raw["intermediate_size"]) == (5, 5e5, 128)
    assert raw["layer_types"] == ["full_attention"] * 2 and raw["is_causal"] is True
    config, plain = (load_config(tmp_path / name) for name in ("draft", "plain"))
    assert (config.dependency.rank, config.dependency.top_k) == (16, 20)
    assert config.causal and not plain.causal and plain.dependency is None
    assert (config.window, plain.window) == (64, None)
    drafters = [Drafter.load(tmp_path / name).state_dict() for name in ("draft", "plain")]
    assert all(torch.equal(drafters[0][name], value) for name, value in drafters[1].items())
    assert drafters[0]["dependency.successor"].abs().max() == 0


# Hidden size, layers and context, first V4-Pro's.
@pytest.mark.parametrize(
    "dimensions, expected",
    [
        ((7168, 61, 1 << 20), DrafterShape(5, 56, 8, 128, 21504, window=2048, dependency_rank=256)),
        ((2560, 12, 2049), DrafterShape(4, 20, 4, 128, 7680, window=2048, dependency_rank=256)),
        ((32, 2, 128), DrafterShape(1, 1, 1, 64, 96, dependency_rank=16)),
    ],
)
def test_the_default_shape_follows_the_target(dimensions, expected):
    d, layers, context = dimensions
    facts = TargetFacts("any", d, 1000, layers, 4, 1e-6, 1e-6, context)
    assert shape_for(facts) == expected


def test_the_sample_is_what_init_makes_for_v4_flash():
    raw, facts = raw_of(SAMPLE / "drafter"), TargetFacts.from_config(raw_of(SAMPLE / "target"))
    made = draft_config(facts, None, shape_for(facts), raw["dflash_config"]["mask_token_id"])
    made["hyperdflash_config"]["target"]["hc_head_fingerprint"] = "0" * 16
    assert {k: v for k, v in raw.items() if k != "_note"} == made


def test_a_dry_run_prints_the_shape_and_writes_nothing(tmp_path, capsys, refused, monkeypatch):
    """From a config.json alone; K/V bytes are 5 layers of 8 heads of 128, twice, in bf16."""
    monkeypatch.chdir(tmp_path)
    target = ["--target", str(SAMPLE / "target")]
    with torch.device("meta"):
        sample = Drafter(raw_of(SAMPLE / "drafter"))
    parameters = sum(parameter.numel() for parameter in sample.parameters())
    for options, numbers in (
        ([], [f"{parameters:,}", "5, 32 heads", "2048", "2,057"]),
        (["--window", "none", "--reducer", "fc"], ["20,480"]),
    ):
        assert main(["init", *target, "--dry-run", *options]) == 0
        said = capsys.readouterr().out
        assert all(number in said for number in numbers), said
    assert list(tmp_path.iterdir()) == []
    assert "--out" in refused("init", *target)


def test_a_full_disk_is_one_line_with_the_path(tmp_path, target_dir, refused):
    with files_of(100_000):
        said = refused("init", "--target", target_dir, "--out", tmp_path / "draft")
    assert str(tmp_path / "draft" / "model.safetensors") in said
    assert not list((tmp_path / "draft").glob("*.safetensors*"))
    assert initialise(target_dir, tmp_path / "draft") == 0


def test_of_a_hub_id_only_the_gate_s_bytes_are_read(tmp_path, target_dir, hc_head, monkeypatch):
    """A folder in the place of the hub; no network in tests."""
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
    options = ["--revision", "main", *MASK]
    assert initialise("owner/name", tmp_path / "draft", *options) == 0
    reducer = Drafter.load(tmp_path / "draft").reducer
    assert all(map(torch.equal, [getattr(reducer, part) for part in NAMES], hc_head))
    assert set(downloaded) == {"config.json", INDEX}
    smallest = min(path.stat().st_size for path in root.glob("*.safetensors"))
    assert 16_000 < sum(read) < 30_000 < smallest
    assert initialise("owner/gone", tmp_path / "other", *options) == 2
