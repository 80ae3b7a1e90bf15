"""Training files: what they may hold, what they become, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.train import load_pair, read_schedule
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.borrowed_target import BorrowedTarget
from sglang_hyperdflash.training.captured import CaptureIdentity, CaptureWriter, data_digest
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample
from sglang_hyperdflash.training.trainer import Recipe, Trainer
from sglang_hyperdflash.training.transformers_target import TransformersTarget
from tests.conftest import EXAMPLE, ROOT

DRAFTER = EXAMPLE / "drafter"

WHOLE = """
target = "target"
draft = "draft"
out = "out"
max_length = 99
features = "online"
[held_out]
math = "math.jsonl"
[objective]
alpha = 0.2
teacher = "mean"
[[stage]]
data = ["a.jsonl", "hub:owner/name"]
epochs = 1.5
batch = 4
lr = 8e-4
[[stage]]
data = ["b.jsonl"]
minutes = 3
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path):
    schedule = read_schedule(written(tmp_path, WHOLE))
    assert schedule.target == "target"  # no such folder here: a hub id
    assert schedule.held_out == {"math": tmp_path / "math.jsonl"}
    assert schedule.objective == Objective(alpha=0.2, teacher="mean")
    first, second = schedule.stages
    assert first.data == (tmp_path / "a.jsonl", "hub:owner/name")
    recipe = first.resolve(samples=10, objective=schedule.objective)
    assert (recipe.steps, recipe.minutes, recipe.lr) == (4, None, 8e-4)  # ceil(1.5 * 10 / 4)
    assert recipe.objective is schedule.objective
    assert second.resolve(10, schedule.objective).minutes == 3


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "recipes").glob("*.toml")))
def test_the_committed_recipes_are_valid(path):
    schedule = read_schedule(path)
    for stage in schedule.stages:
        stage.resolve(1000, schedule.objective)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('draft = "draft"', "", "draft is missing"),
        ('target = "target"', "target = ", "is not TOML"),
        ("max_length = 99", "max_len = 99", "unknown field max_len; known are"),
        ('teacher = "mean"', "tau = 1", r"\[objective\]: unknown field tau"),
        ('teacher = "mean"', 'teacher = "none"', "objective.teacher must be one of"),
        ("epochs = 1.5", "", "stage 1 needs exactly one of epochs, steps or minutes; found none"),
        ("minutes = 3", "minutes = 3\nsteps = 4", "stage 2 needs exactly one of"),
        ("lr = 8e-4", "learning_rate = 1", "stage 1: unknown field learning_rate"),
        ('data = ["b.jsonl"]', "", "stage 2: data is missing"),
        ('"online"', '"magic"', "features must be one of cache, online, captured"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, old, new, message):
    assert old in WHOLE
    with pytest.raises(HyperDFlashConfigError, match=message):
        read_schedule(written(tmp_path, WHOLE.replace(old, new)))


def test_files_that_are_not_there(tmp_path, capsys):
    work = ["--work", str(tmp_path / "work")]
    assert main(["train", "--config", str(tmp_path / "none.toml"), *work]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["train", "--config", str(written(tmp_path, WHOLE)), *work]) == 2
    assert "no config.json in the draft checkpoint folder" in capsys.readouterr().err


def test_a_drafter_of_another_target_is_refused(tmp_path, target_dir, drafter_dir, capsys):
    config = (drafter_dir / "config.json").read_text()
    fingerprint = config.split('"hc_head_fingerprint": "')[1].split('"')[0]
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").symlink_to(drafter_dir / "model.safetensors")
    (draft / "config.json").write_text(config.replace(fingerprint, "0" * 16))
    text = WHOLE.replace('"target"', f'"{target_dir}"')
    work = ["--work", str(tmp_path / "work")]
    assert main(["train", "--config", str(written(tmp_path, text)), *work]) == 2
    assert "was made for another target" in capsys.readouterr().err


def test_a_target_of_transformers_own_class_is_loaded_by_transformers(tmp_path, target_dir):
    target = tmp_path / "target"
    target.mkdir()
    for path in target_dir.iterdir():
        (target / path.name).symlink_to(path)
    (target / "config.json").unlink()
    config = (target_dir / "config.json").read_text().replace("PortableDeepSeekV4", "DeepseekV4")
    (target / "config.json").write_text(config)
    shutil.copytree(DRAFTER, tmp_path / "draft")
    for folder, kind in ((target, TransformersTarget), (target_dir, LocalTarget)):
        text = WHOLE.replace('"target"', f'"{folder}"')
        loaded, drafter = load_pair(read_schedule(written(tmp_path, text)))
        assert type(loaded) is kind
        assert drafter.config.hidden_size == 256


def test_training_from_a_capture_loads_no_target(tmp_path, target_dir, monkeypatch):
    """The same drafter as from the target's own states, from shards and the borrowed tensors."""
    target = LocalTarget(target_dir)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 2000, (n,), generator=g).tolist() for n in (20, 33, 28)]
    samples = [Sample.continuation(row, 6) for row in rows]
    online = OnlineFeatures(target, samples)
    fingerprint = target.hc_head.fingerprint()
    norm = tensors_fingerprint(BorrowedTarget(TargetFiles(str(target_dir))).norm)
    identity = CaptureIdentity("any", fingerprint, norm, 4, 256, "float32", data_digest(samples))
    states = [online.states([i]) for i in range(3)]
    CaptureWriter(tmp_path / "states", identity).add(0, samples, states)
    options = "--layers 1 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 64"
    sizes = options.split()
    assert (
        main(["init", "--target", str(target_dir), "--out", str(tmp_path / "draft"), *sizes]) == 0
    )
    text = f"""
target = "{target_dir}"
draft = "draft"
out = "out"
features = "captured"
[objective]
teacher = "mean"
[[stage]]
data = ["states"]
steps = 4
batch = 2
bf16 = false
"""

    def forbidden(*_):
        raise AssertionError("a captured target must not be loaded")

    monkeypatch.setattr(LocalTarget, "__init__", forbidden)
    config = written(tmp_path, text)
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 0
    recipe = Recipe(steps=4, batch=2, bf16=False, objective=Objective(teacher="mean"))
    drafter = Drafter.load(tmp_path / "draft")
    Trainer(drafter, target, online, {}, recipe, tmp_path / "plain").run(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4, msg=name)
    assert not torch.equal(
        found["layers.0.mlp.up_proj.weight"], drafter.layers[0].mlp.up_proj.weight
    )
