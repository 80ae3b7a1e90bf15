"""The training loop on the real tiny target: its loss, its sums over processes, its resume."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.losses import position_weights
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import (
    FeatureCache,
    OnlineFeatures,
    Passes,
    Sample,
    collate,
    generator_seed,
)
from sglang_hyperdflash.training.trainer import Trainer, read_state, saved_states
from tests.unit.training.streams import new_drafter
from tests.waiting import PATIENCE
from tests.warm_start.client import ENVIRONMENT, run_command, start

RECIPE = Recipe(steps=6, batch=4, anchors=3, every=3, warmup_steps=2, bf16=False)


def test_seeds_that_fit_a_generator_stay_and_others_stay_apart():
    assert generator_seed(41 * 2**40) == 41 * 2**40
    seeds = {generator_seed((seed + 1) * 2**40) for seed in (0, 1, 2**24, 2**24 + 1, 20260131)}
    assert len(seeds) == 5 and max(seeds) < 2**64


@pytest.fixture(scope="module")
def samples():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (20, 33, 41, 28, 37)]
    return [
        *(Sample.continuation(row, 6) for row in rows[:4]),
        Sample(rows[4], ((5, 14), (20, 37))),
    ]


@pytest.fixture(scope="module")
def cache(target, samples):
    return FeatureCache(target, samples, dtype=torch.float32)


def new_trainer(target, cache, folder, **changes) -> Trainer:
    recipe = dataclasses.replace(RECIPE, **changes)
    return Trainer(new_drafter(target), target, cache, {}, recipe, folder)


def gradients(trainer: Trainer) -> torch.Tensor:
    trainer.optimizer.zero_grad()
    trainer.accumulate(0)
    return torch.cat([p.grad.reshape(-1) for p in trainer.drafter.parameters()])


def eager_loss(trainer: Trainer) -> float:
    """Eq. 3 of step 0, one drafted token at a time, from the logits of each block alone."""
    objective, target, drafter = trainer.recipe.objective, trainer.target, trainer.drafter
    weights = position_weights(6, objective.gamma)
    ce = weight = kl = blocks = 0.0
    for ids, rows, drawn in trainer.micro_batches(0):
        for row, i in enumerate(ids):
            sample = trainer.train.samples[i]
            states = trainer.train.states([i])
            for anchor in drawn.anchors[row][drawn.keep[row]].tolist():
                alone = torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool)
                hidden = trainer.replay.draft_states(collate([sample]), states, *alone)[0, 0]
                blocks += 1
                for k in range(1, 7):
                    at = anchor + k
                    if at >= len(sample.tokens) or not bool(rows.loss_mask[row, at]):
                        break
                    q = target.lm_head(hidden[k - 1]).log_softmax(-1)
                    ce -= weights[k - 1].item() * q[sample.tokens[at]].item()
                    weight += weights[k - 1].item()
                    if k <= objective.P:
                        state = target.final(states.residual[0, at - 1])
                        p = (target.lm_head(state) / objective.T).log_softmax(-1)
                        q = (target.lm_head(hidden[k - 1]) / objective.T).log_softmax(-1)
                        kl += (p.exp() * (p - q)).sum().item()
    assert drafter.config.num_drafts == 6
    return ce / weight + objective.alpha * objective.T**2 / objective.P * kl / blocks


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(T=2.0, P=3, alpha=0.4),
        Objective(alpha=0.0),
        Objective(chunk=3, gamma=2.0),
    ],
)
def test_the_loss_is_eq_3(target, cache, tmp_path, objective):
    trainer = new_trainer(target, cache, tmp_path, objective=objective)
    with torch.no_grad():
        expected = eager_loss(trainer)
    assert trainer.accumulate(0)["loss"] == pytest.approx(expected, rel=1e-4)


def test_micro_batches_and_chunks_change_no_gradient(target, cache, tmp_path):
    whole = gradients(new_trainer(target, cache, tmp_path / "a"))
    objective = Objective(chunk=5)
    pieces = new_trainer(target, cache, tmp_path / "b", micro_batch=1, objective=objective)
    assert (gradients(pieces) - whole).norm() < 1e-5 * whole.norm()


def test_online_features_are_the_cached_ones(target, cache, samples):
    online = OnlineFeatures(target, samples).states([1, 4])
    cached = cache.states([1, 4])
    torch.testing.assert_close(online.residual, cached.residual, rtol=1e-4, atol=1e-3)


def test_every_sample_comes_once_in_a_pass(target, cache, tmp_path):
    trainer = new_trainer(target, cache, tmp_path, batch=3)
    seen = [i for step in range(5) for i in trainer.passes.batch(step)]
    assert [sorted(seen[at : at + 5]) for at in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3


def test_every_pass_has_another_order_which_a_restart_repeats():
    passes = Passes(1000, 10, seed=3)
    batches = [passes.batch(step) for step in range(200)]
    for epoch in (batches[:100], batches[100:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(1000))
    assert batches[0] != batches[100]
    assert Passes(1000, 10, seed=3).batch(150) == batches[150]


def test_samples_of_similar_length_run_together_and_processes_have_equal_shares(
    target, cache, tmp_path
):
    """Found as: every micro batch was padded to its longest sample, twice the tokens there are."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 2000, (1000,), generator=g)
    trainer = new_trainer(target, cache, tmp_path, batch=64, micro_batch=8)
    trainer.train = SimpleNamespace(lengths=lengths)
    trainer.passes = Passes(1000, 64, seed=3)
    padded = [0, 0]
    for step in range(10):
        drawn = []
        for rank in range(2):
            trainer.world = SimpleNamespace(rank=rank, size=2)
            for share in trainer._shares(step):
                assert len(share) == 8
                padded[rank] += 8 * max(int(lengths[i]) for _, i in share)
                drawn += share
        assert sorted(drawn) == list(enumerate(trainer.passes.batch(step)))
    together = sum(int(lengths[trainer.passes.batch(step)].sum()) for step in range(10))
    assert sum(padded) < 1.3 * together
    assert abs(padded[0] - padded[1]) < 0.05 * padded[0]


def test_the_next_steps_are_read_while_one_computes(target, cache, tmp_path):
    """Found as: every micro batch was read when it was needed, and nothing meanwhile."""
    asked, missed = [], []

    class Watched:
        samples, lengths = cache.samples, cache.lengths

        def prefetch(self, indices):
            asked.append(indices)

        def states(self, indices):
            later = [i for step in (now[0] + 1, now[0] + 2) for i in trainer.passes.batch(step)]
            if indices not in asked or not set(later) <= {i for each in asked for i in each}:
                missed.append(indices)
            return cache.states(indices)

    trainer = new_trainer(target, Watched(), tmp_path, batch=2, micro_batch=1)
    now = [0]
    for now[0] in range(3):
        asked.clear()
        trainer.step()
    assert not missed and trainer.state["step"] == 3


def test_anchors_stay_inside_one_answer(samples):
    rows = collate([samples[4]])
    blocks = Blocks.draw(rows, 100, 7, [0])
    assert blocks.anchors[0].tolist() == [*range(5, 13), *range(20, 36)]
    lengths = blocks.supervised[0].sum(-1).tolist()
    assert lengths == [min(6, 13 - a) for a in range(5, 13)] + [
        min(6, 36 - a) for a in range(20, 36)
    ]


def test_a_cut_run_ends_with_the_same_weights(target, cache, tmp_path):
    whole = new_trainer(target, cache, tmp_path / "whole")
    whole.run(tmp_path / "whole-best")

    def cut(trainer, _report):
        if trainer.state["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new_trainer(target, cache, tmp_path / "cut").run(tmp_path / "cut-best", cut)
    resumed = new_trainer(target, cache, tmp_path / "cut")
    assert resumed.state["step"] == 3
    resumed.run(tmp_path / "cut-best")
    for (name, a), b in zip(
        whole.drafter.state_dict().items(), resumed.drafter.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    saved = [(tmp_path / f"{n}-best" / "model.safetensors").read_bytes() for n in ("whole", "cut")]
    assert saved[0] == saved[1]


def test_a_loss_that_is_not_finite_stops_before_the_step(target, cache, tmp_path):
    trainer = new_trainer(target, cache, tmp_path)
    trainer.drafter.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"not finite .* at step 0\. Lower the stage's lr"):
        trainer.step()
    assert trainer.state["step"] == 0


def test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint(target, cache, tmp_path):
    """Found as: clipping spread it over all weights, and the only checkpoint was replaced."""
    trainer = new_trainer(target, cache, tmp_path, every=2)
    weight, calls = trainer.drafter.layers[0].mlp.up_proj.weight, itertools.count(1)
    weight.register_hook(lambda grad: grad * (float("inf") if next(calls) == 4 else 1.0))
    kept = {}

    def keep(trainer, _report):
        kept.update({n: w.clone() for n, w in trainer.drafter.state_dict().items()})

    with pytest.raises(FloatingPointError, match=r"gradient is not finite .* at step 3\. Lower"):
        trainer.run(tmp_path / "best", keep)
    assert [path.name for path in saved_states(tmp_path)] == ["state-2.pt"]
    for name, value in trainer.drafter.state_dict().items():
        assert torch.equal(value, kept[name]), name


def lines_without_times(folder: Path) -> list[dict]:
    times = {"minutes", "tokens_s", "data_wait"}
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert all(times <= set(line) and line["gradient_norm"] > 0 for line in lines)
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


@pytest.mark.parametrize("step", [2, 3, 6])  # between checkpoints, at one, and at the end
def test_sigterm_saves_the_step_and_a_rerun_ends_the_same(target, cache, tmp_path, step):
    whole = new_trainer(target, cache, tmp_path / "whole")
    whole.run(tmp_path / "whole-best")

    def terminate(trainer, _report):
        if trainer.state["step"] == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        new_trainer(target, cache, tmp_path / "cut").run(tmp_path / "cut-best", terminate)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert saved_states(tmp_path / "cut")[-1].name == f"state-{step}.pt"
    resumed = new_trainer(target, cache, tmp_path / "cut")
    assert resumed.state["step"] == step
    resumed.run(tmp_path / "cut-best")
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(value, resumed.drafter.state_dict()[name]), name
    assert lines_without_times(tmp_path / "cut") == lines_without_times(tmp_path / "whole")
    saved = [(tmp_path / f"{n}-best" / "model.safetensors").read_bytes() for n in ("whole", "cut")]
    assert saved[0] == saved[1]


def test_sigterm_of_another_process_stops_this_one(target, cache, tmp_path):
    trainer = new_trainer(target, cache, tmp_path)
    plain = trainer.world.sum

    def with_another(tensor):
        if tensor.numel() == 3 + 2 * trainer.drafter.config.num_drafts + 1:
            tensor[-1] += 1  # of a step's message, the request to stop
        return plain(tensor)

    trainer.world.sum = with_another
    with pytest.raises(SystemExit):
        trainer.run(tmp_path / "best")
    assert [path.name for path in saved_states(tmp_path)] == ["state-1.pt"]


def test_the_last_checkpoints_are_kept_and_any_resumes(target, cache, tmp_path):
    new_trainer(target, cache, tmp_path, every=1, keep=3).run(tmp_path / "best")
    assert [path.name for path in saved_states(tmp_path)] == [f"state-{n}.pt" for n in (4, 5, 6)]
    expected = (tmp_path / "best" / "model.safetensors").read_bytes()
    for step in (5, 6):
        (tmp_path / f"state-{step}.pt").unlink()
    again = new_trainer(target, cache, tmp_path, every=1, keep=1)
    assert again.state["step"] == 4
    again.run(tmp_path / "best")
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == expected
    assert [path.name for path in saved_states(tmp_path)] == ["state-6.pt"]


def test_a_full_disk_leaves_the_last_state_whole(target, cache, tmp_path, monkeypatch):
    trainer = new_trainer(target, cache, tmp_path)

    def run_out_of_space(_content, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def then_full(trainer, _report):
        if trainer.state["step"] == 3:
            monkeypatch.setattr(torch, "save", plain)
        else:
            monkeypatch.setattr(torch, "save", run_out_of_space)

    plain = torch.save
    with pytest.raises(WriteFailed, match=r"state-6.pt: No space left on device\. Free"):
        trainer.run(tmp_path / "best", then_full)
    assert [p.name for p in tmp_path.glob("state*")] == ["state-3.pt"]
    assert read_state(tmp_path / "state-3.pt")["state"]["step"] == 3
    monkeypatch.undo()
    whole = new_trainer(target, cache, tmp_path)
    whole.run(tmp_path / "best")
    assert Drafter.load(tmp_path / "best").config == whole.drafter.config


def test_a_kill_between_any_two_files_of_a_checkpoint_loses_neither(
    target, cache, tmp_path, monkeypatch
):
    """A run is cut before each of its renames in turn; resumed, it ends as an undisturbed one."""
    plain = Path.replace

    def run(name: str) -> dict[str, bytes]:
        trainer = new_trainer(target, cache, tmp_path / name, every=2)
        trainer.run(tmp_path / name / "best")
        names = ("best/model.safetensors", "best/config.json", "training_log.jsonl")
        found = {n: (tmp_path / name / n).read_bytes() for n in names}
        log = [json.loads(line) for line in found.pop(names[-1]).splitlines()]
        assert [record["step"] for record in log] == [2, 4, 6]
        return found

    def cut_before(number: int) -> list[str]:
        """Renames of one run, the last of them not done."""
        done = itertools.count()

        def cut(path, target):
            renamed.append(target.name)
            if next(done) == number:
                raise KeyboardInterrupt
            return plain(path, target)

        renamed: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", cut)
            with contextlib.suppress(KeyboardInterrupt):
                run(f"cut-{number}")
        return renamed

    expected = run("whole")
    every = cut_before(-1)
    states = {f"state-{step}.pt" for step in (2, 4, 6)}
    assert set(every) == {"model.safetensors", "config.json", "training_log.jsonl", *states}
    for number, name in enumerate(every):
        assert cut_before(number)[-1] == name
        assert run(f"cut-{number}") == expected, f"cut before rename {number}, {name}"


SCHEDULE = """
target = "{target}"
draft = "{folder}/draft"
out = "{folder}/{name}-out"
max_length = 300
features = "online"
[[stage]]
data = ["{folder}/data.jsonl"]
steps = {steps}
batch = 4
anchors = 4
every = {every}
warmup_steps = 5
bf16 = false
"""


@pytest.fixture(scope="module")
def prepared(target, target_dir, tmp_path_factory):
    """A folder with an untrained drafter and a few conversations."""
    folder = tmp_path_factory.mktemp("train")
    new_drafter(target).save(folder / "draft")
    lines = [
        json.dumps(
            {"instruction": f"Count from {i}", "output": ", ".join(map(str, range(i, i + 9)))}
        )
        for i in range(12)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def command(prepared, target_dir, name: str, steps: int, every: int) -> list[str]:
    config = prepared / f"{name}.toml"
    fields = {"target": target_dir, "folder": prepared, "name": name}
    config.write_text(SCHEDULE.format(**fields, steps=steps, every=every))
    work = str(prepared / name)
    return ["train", "--config", str(config), "--work", work, "--threads", "1"]


# A training that is killed in the middle of a step, between two checkpoints.
KILLED_AT_17 = """
import os, signal, sys
from sglang_hyperdflash import cli
from sglang_hyperdflash.training.trainer import Trainer

accumulate = Trainer.accumulate


def killed(self, step):
    found = accumulate(self, step)
    if step == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


Trainer.accumulate = killed
cli.main(sys.argv[1:])
"""


def run(arguments: list[str]) -> None:
    done = run_command(*arguments, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]


def test_killed_and_resumed_gives_the_same_drafter(prepared, target_dir):
    run(command(prepared, target_dir, "whole", 40, 10))
    arguments = command(prepared, target_dir, "killed", 40, 10)
    environment = {**os.environ, **ENVIRONMENT}
    killed = start([sys.executable, "-c", KILLED_AT_17, *arguments], env=environment)
    assert killed.wait(PATIENCE) == -signal.SIGKILL
    stage = prepared / "killed" / "stage-1"
    assert read_state(saved_states(stage)[-1])["state"]["step"] == 10
    run(arguments)
    found = [
        (prepared / f"{name}-out" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert found[0] == found[1]


def test_two_processes_follow_the_loss_of_one(prepared, target_dir):
    run(command(prepared, target_dir, "one", 30, 3))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    torchrun += ["-m", "sglang_hyperdflash.cli", *command(prepared, target_dir, "two", 30, 3)]
    two = subprocess.run(torchrun, capture_output=True, text=True, timeout=PATIENCE)
    assert two.returncode == 0, two.stderr[-3000:]
    curves = []
    for name in ("one", "two"):
        log = prepared / name / "stage-1" / "training_log.jsonl"
        curves.append([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    assert len(curves[0]) == len(curves[1]) == 10
    assert curves[0][-1] < 0.8 * curves[0][0]
    gaps = [abs(a - b) / a for a, b in zip(*curves, strict=True)]
    assert max(gaps) < 1e-3
    assert all(math.isfinite(v) for v in curves[1])
