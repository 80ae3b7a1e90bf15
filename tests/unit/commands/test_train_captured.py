"""Training without a loaded target: from captured states and the checkpoint's borrowed tensors."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.train import load_pair
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Recipe, read_schedule
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample
from sglang_hyperdflash.training.store.manifest import Data, Identity, data_digest
from sglang_hyperdflash.training.store.writer import open_writer
from sglang_hyperdflash.training.trainer import Trainer
from tests.unit.commands.test_train import DRAFTER, WHOLE, written


def test_a_target_of_another_class_is_trained_from_a_capture(tmp_path, target_dir):
    target = tmp_path / "target"
    target.mkdir()
    for path in target_dir.iterdir():
        (target / path.name).symlink_to(path)
    (target / "config.json").unlink()
    config = (target_dir / "config.json").read_text().replace("PortableDeepSeekV4", "DeepseekV4")
    (target / "config.json").write_text(config)
    shutil.copytree(DRAFTER, tmp_path / "draft")
    schedule = read_schedule(written(tmp_path, WHOLE.replace('"target"', f'"{target}"')))
    with pytest.raises(HyperDFlashConfigError, match=r"is a DeepseekV4ForCausalLM.*capture"):
        load_pair(schedule)
    ours = read_schedule(written(tmp_path, WHOLE.replace('"target"', f'"{target_dir}"')))
    assert type(load_pair(ours)[0]) is LocalTarget


def test_training_from_a_capture_loads_no_target(tmp_path, target_dir, monkeypatch):
    """The same drafter as from the target's own states, from shards and the borrowed tensors."""
    target = LocalTarget(target_dir)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (20, 33, 28)]
    samples = [Sample.continuation(row, 6) for row in rows]
    online = OnlineFeatures(target, samples)
    fingerprint = target.hc_head.fingerprint()
    norm = tensors_fingerprint(BorrowedTarget(TargetFiles(str(target_dir))).final.norm)
    identity = Identity("any", fingerprint, norm, 4, 256, "float32")
    with open_writer(tmp_path / "states", identity, "one", "hyperdflash capture", {}) as writer:
        writer.begin(Data(data_digest(samples), len(samples), 2**30))
        writer.add(0, samples, [(online.states([i]).residual[0],) for i in range(3)])
    options = (
        "--layers 1 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 64 --dependency-rank 0"
    )
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
alpha = 0.2
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
    recipe = Recipe(steps=4, batch=2, bf16=False, objective=Objective(alpha=0.2))
    drafter = Drafter.load(tmp_path / "draft")
    Trainer(drafter, target, online, {}, recipe, tmp_path / "plain").run(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4, msg=name)
    assert not torch.equal(
        found["layers.0.mlp.up_proj.weight"], drafter.layers[0].mlp.up_proj.weight
    )
