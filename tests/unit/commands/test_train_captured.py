"""Training without a loaded target: from captured states and the checkpoint's borrowed tensors."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.capture import identity_of
from sglang_hyperdflash.commands.train import load_pair
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Recipe, read_schedule
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample
from sglang_hyperdflash.training.store import writer as store_writer
from sglang_hyperdflash.training.store.manifest import Data, Identity, data_digest
from sglang_hyperdflash.training.store.writer import open_writer
from sglang_hyperdflash.training.trainer import Trainer
from tests.unit.commands.test_train import DRAFTER, WHOLE, written
from tests.unit.targets.test_kinds import deepseek_v41

SIZES = [
    *("--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "32"),
    *("--intermediate-size", "64", "--dependency-rank", "0"),
]
CAPTURED = """
target = "{target}"
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


def test_v41_is_trained_by_its_lagged_gate(tmp_path, target_dir, monkeypatch, capsys):
    """Found as: V4.1 could have a drafter, and no states to train it from."""
    target = deepseek_v41(tmp_path / "target", target_dir)
    weights, g = load_file(target / "model.safetensors"), torch.Generator().manual_seed(0)
    d = len(weights["norm.weight"])
    weights |= {name: torch.randn(1363, d, generator=g) for name in ("embed.weight", "head.weight")}
    save_file(weights, target / "model.safetensors")
    identity = identity_of(TargetFiles(str(target)), "bfloat16")
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (20, 33, 28)]
    samples = [Sample.continuation(row, 6) for row in rows]
    states = [torch.randn(len(row), 4 * d, generator=g).bfloat16() for row in rows]
    with open_writer(tmp_path / "states", identity, "one", "hyperdflash capture", {}) as writer:
        writer.begin(Data(data_digest(samples), len(samples), 2**30))
        writer.add(0, samples, [(each,) for each in states])
    draft, config = tmp_path / "draft", written(tmp_path, CAPTURED.format(target=target))
    options = ["--gate", "approximate", "--mask-token-id", "4", *SIZES]
    assert main(["init", "--target", str(target), "--out", str(draft), *options]) == 0
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 0
    log = (tmp_path / "work" / "stage-1" / "training_log.jsonl").read_text()
    (line,) = map(json.loads, log.splitlines())
    assert line["step"] == 4 and line["kl"] > 0.1
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("draft", "out"))
    assert not torch.equal(before["reducer.fn"], after["reducer.fn"])
    # A store from before such samples were left out is no reason to lower the learning rate.
    monkeypatch.setattr(store_writer, "is_finite", lambda _: True)
    states[1][4, 5] = torch.nan
    with open_writer(tmp_path / "broken", identity, "one", "hyperdflash capture", {}) as writer:
        writer.begin(Data(data_digest(samples), len(samples), 2**30))
        writer.add(0, samples, [(each,) for each in states])
    config.write_text(config.read_text().replace('"states"', '"broken"').replace('"out"', '"new"'))
    capsys.readouterr()
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "second")]) == 2
    error = capsys.readouterr().err
    assert f"rows 20 to 52 of {tmp_path}/broken/shards/one-00000000.safetensors" in error
    assert "lr" not in error.split()


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
    init = ["init", "--target", str(target_dir), "--out", str(tmp_path / "draft")]
    assert main([*init, *SIZES]) == 0

    def forbidden(*_):
        raise AssertionError("a captured target must not be loaded")

    monkeypatch.setattr(LocalTarget, "__init__", forbidden)
    config = written(tmp_path, CAPTURED.format(target=target_dir))
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
