"""The training loop on the real tiny target: its loss, its sums over processes, its resume."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training import process_group
from sglang_hyperdflash.training.anchors import sample_anchors
from sglang_hyperdflash.training.checkpoints import read_state, saved_states, step_of
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import Passes, collate, generator_seed
from sglang_hyperdflash.training.trainer import Trainer, best_weights
from tests.unit.commands.builders import SAMPLE, small, write_rows
from tests.unit.training.conftest import FeatureCache, answers
from tests.unit.training.streams import new_drafter, random_drafter
from tests.waiting import PATIENCE

pytestmark = pytest.mark.heavy

RECIPE = Recipe(steps=6, batch=4, anchors=3, every=3, warmup_steps=2, bf16=False)
# Some labels are among so many candidates.
PRODUCT = {"dependency_form": "product", "dependency_top_k": 700}


def test_seeds_that_fit_a_generator_stay_and_others_stay_apart():
    assert generator_seed(41 * 2**40) == 41 * 2**40
    seeds = {generator_seed((seed + 1) * 2**40) for seed in (0, 1, 2**24, 2**24 + 1, 20260131)}
    assert len(seeds) == 5 and max(seeds) < 2**64


@pytest.fixture(scope="module")
def samples():
    """Of the last one, two spans are answers."""
    *others, last = answers(20, 33, 41, 28, 37)
    return [*others, dataclasses.replace(last, spans=((5, 14), (16, 37)))]


@pytest.fixture(scope="module")
def cache(target, samples):
    return FeatureCache(target, samples, dtype=torch.float32)


def new_trainer(target, cache, folder, drafter=None, held_out=None, **changes) -> Trainer:
    recipe = dataclasses.replace(RECIPE, **changes)
    drafter = drafter or new_drafter(target)
    return Trainer(drafter, target, cache, held_out or {}, recipe, folder)


def eager_loss(trainer: Trainer) -> torch.Tensor:
    """Of step 0, one drafted token at a time, from the logits of each block alone."""
    objective, target, head = trainer.objective, trainer.target, trainer.drafter.dependency
    sums, weight, blocks = torch.zeros(3), 0.0, 0
    for ids, rows, drawn in trainer.micro_batches(0):
        for row, i in enumerate(ids):
            sample, states = trainer.train.samples[i], trainer.train.states([i])
            for anchor in drawn.anchors[row][drawn.keep[row]].tolist():
                alone = torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool)
                hidden = trainer.replay.draft_states(collate([sample]), states, *alone)[0, 0]
                blocks += 1
                for k, h in enumerate(hidden):
                    place = anchor + k + 1
                    if place >= len(sample.tokens) or not bool(rows.loss_mask[row, place]):
                        break
                    label, w = sample.tokens[place], math.exp(-k / objective.gamma)
                    u = s = target.lm_head(h)
                    if head is not None:
                        gate = head.gate.weight @ h + (head.form == "residual")
                        s = u + head.successor @ (head.predecessor[sample.tokens[place - 1]] * gate)
                    ce, plain = (-x.log_softmax(-1)[label] for x in (s, u))
                    distance = torch.zeros(())
                    taught = target.lm_head(target.final(states.residual[0, place - 1]))
                    p, q = (x.div(objective.T).log_softmax(-1) for x in (taught, s))
                    if objective.loss == "acceptance":
                        distance = w * (p.exp() - q.exp()).abs().sum()
                    elif objective.loss == "selector":
                        chosen = u.topk(trainer.drafter.config.candidates).indices
                        among = s[chosen].logsumexp(-1) - s[label] if label in chosen else 0.0
                        ce = plain + among
                    elif k < objective.P:
                        distance = (p.exp() * (p - q)).sum()
                    weight += w
                    sums = sums + torch.stack([w * ce, distance, w * plain])
    ce, distance, plain = sums / weight
    if objective.loss == "acceptance":
        ce = (1 - objective.mix) * ce + objective.mix * distance
    elif objective.loss == "ce_kl":
        ce = ce + objective.alpha * objective.T**2 / objective.P * sums[1] / blocks
    return ce + objective.candidates * plain


@pytest.mark.parametrize(
    ("objective", "shape", "micro_batch"),
    [
        (Objective(loss="ce_kl"), {"dependency_rank": None}, 8),
        (Objective(T=2.0, P=3, alpha=0.4, gamma=2.0, chunk=5, loss="ce_kl"), {}, 1),
        (Objective(loss="acceptance"), {}, 8),
        (Objective(loss="selector", chunk=7), PRODUCT, 2),
    ],
    ids=["paper", "other", "acceptance", "selector"],
)
def test_loss_and_gradients_are_as_restated(target, cache, tmp_path, objective, shape, micro_batch):
    """Eq. 3 of the paper, and DSpark's and DFlash 2's forms with a head, in any pieces."""
    drafter, changes = random_drafter(target, **shape), {"micro_batch": micro_batch, "clip": 1e9}
    trainer = new_trainer(target, cache, tmp_path, drafter, objective=objective, **changes)
    expected = eager_loss(trainer)
    names, parameters = zip(*trainer.drafter.named_parameters(), strict=True)
    gradients = torch.autograd.grad(expected, parameters)
    report = trainer.keep(trainer.step())
    assert report["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert report["gradient_norm"] > 0
    for name, parameter, wanted in zip(names, parameters, gradients, strict=True):
        assert wanted.norm() > 0, name
        assert (parameter.grad - wanted).norm() < 1e-4 * wanted.norm(), name


def test_anchors_stay_inside_one_answer(samples):
    blocks = Blocks.draw(collate([samples[4]]), 100, 7, [0])
    places = [*range(5, 13), *range(16, 36)]
    assert blocks.anchors[0].tolist() == places
    lengths = [min(6, (13 if place < 14 else 36) - place) for place in places]
    assert blocks.supervised[0].sum(-1).tolist() == lengths


def test_anchors_are_drawn_without_replacement_in_order_and_uniformly():
    valid = torch.tensor([[True, False, True, True, False, True], [False] * 6])
    seen = torch.zeros(6)
    for seed in range(2000):
        anchors, keep = sample_anchors(valid, 2, [seed, seed])
        chosen = anchors[0][keep[0]].tolist()
        assert chosen == sorted(set(chosen)) and len(chosen) == 2 and not keep[1].any()
        seen[chosen] += 1
    assert not seen[~valid[0]].any()
    assert (seen[valid[0]] / 2000 - 0.5).abs().max() < 0.05
    anchors, keep = sample_anchors(valid, 9, [0, 0])  # more than there are
    assert anchors[0][keep[0]].tolist() == [0, 2, 3, 5]
    anchors, keep = sample_anchors(valid[1:], 3, [0])
    assert anchors.shape == (1, 1) and not keep.any()


def test_every_sample_comes_once_in_a_pass_whose_order_a_restart_repeats():
    """Also where a batch does not divide the samples."""
    for count, size in ((1000, 10), (1000, 30)):
        passes = Passes([count], size, seed=3)
        seen = [i for step in range(3 * count // size) for i in passes.batch(step)]
        orders = [seen[start : start + count] for start in (0, count, 2 * count)]
        assert [sorted(order) for order in orders] == [list(range(count))] * 3
        assert orders[0] != orders[1] != orders[2]
        assert Passes([count], size, seed=3).batch(50) == seen[50 * size : 51 * size]


def test_a_pass_takes_samples_of_every_source_by_its_weight():
    """A fraction is others in every pass."""
    passes = Passes([100, 40, 10], 10, seed=3, weights=(1.0, 0.5, 3.0))
    assert passes.count == 100 + 20 + 30
    seen = [[i for step in range(15) for i in passes.batch(15 * n + step)] for n in range(3)]
    for order in seen:
        counted = Counter(order)
        assert [counted[i] for i in range(100)] == [1] * 100
        assert sum(counted[i] for i in range(100, 140)) == 20
        assert [counted[i] for i in range(140, 150)] == [3] * 10
    halves = [{i for i in order if 100 <= i < 140} for order in seen]
    assert len(set().union(*halves)) > 30


def test_every_process_deals_the_same_and_gets_its_part(target, cache, tmp_path):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 2000, (1000,), generator=g)
    trainer = new_trainer(target, cache, tmp_path, batch=64, micro_batch=8)
    trainer.train = SimpleNamespace(lengths=lengths, answers=lengths // 2)
    trainer.passes = Passes([1000], 64, seed=3)
    trainer.world = SimpleNamespace(rank=0, size=2)
    for step in range(3):
        shares = trainer._dealt(step)
        drawn = sorted(each for share in shares for part in share for each in part)
        assert len(shares) == 2 and drawn == list(enumerate(trainer.passes.batch(step)))


def test_the_next_steps_are_read_while_one_computes(target, cache, tmp_path):
    asked, trainer = [], new_trainer(target, cache, tmp_path, batch=2, micro_batch=1)

    def states(indices):
        step = trainer.state["step"]
        ahead = {i for n in range(3) for i in trainer.passes.batch(step + n)}
        assert indices in asked and ahead <= {i for each in asked for i in each}
        return cache.states(indices)

    given = {"samples": cache.samples, "lengths": cache.lengths, "answers": cache.answers}
    trainer.train = SimpleNamespace(prefetch=asked.append, states=states, **given)
    for _ in range(3):
        asked.clear()
        trainer.step()


def test_every_state_is_read_ahead_once(target, cache, tmp_path):
    """Also of a step with several micro batches: what was taken is not read again."""
    begun, taken = Counter(), Counter()
    given = {"samples": cache.samples, "lengths": cache.lengths, "answers": cache.answers}

    def prefetch(indices):
        begun[tuple(indices)] = 1

    def states(indices):
        assert begun.pop(tuple(indices), 0) == 1
        taken[tuple(indices)] += 1
        return cache.states(indices)

    trainer = new_trainer(target, cache, tmp_path, batch=4, micro_batch=1, steps=30)
    trainer.train = SimpleNamespace(prefetch=prefetch, states=states, **given)
    for _ in range(10):
        trainer.step()
        assert len(begun) <= 2 * 4  # of the two steps ahead
    assert taken.total() == 40


def test_the_loss_follows_from_the_drafter(target):
    with_head, without = (new_drafter(target, dependency_rank=r).config for r in (10, None))
    assert Objective().resolved(with_head).factors == pytest.approx((0.1, 0.9, 0.3))
    assert Objective().resolved(without).factors == (1.0, 0.15, 0.0)
    assert Objective(loss="ce_kl").resolved(with_head).term == "kl"
    with pytest.raises(HyperDFlashConfigError, match="selector"):
        Objective(loss="selector").resolved(without)


def test_the_head_learns_slower_than_the_rest_and_a_gate_may_not(target, cache, tmp_path):
    rates = {"lr": 1e-3, "lr_floor": 0.0, "dependency_gate": False, "warmup_steps": 1}
    trainer = new_trainer(target, cache, tmp_path, random_drafter(target).train(), **rates)
    before = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    trainer.step()
    # AdamW's first step is the learning rate wherever there is a gradient.
    moved = {n: (p - before[n]).abs().max() for n, p in trainer.drafter.named_parameters()}
    rates = {"dependency.successor": 3e-4, "layers.0.mlp.up_proj.weight": 1e-3}
    for name, rate in (rates | {"dependency.gate.weight": 0.0}).items():
        assert moved[name].item() == pytest.approx(rate, rel=0.02), name


def test_the_best_is_chosen_by_what_is_served(target, cache, tmp_path):
    drafter, recipe = random_drafter(target).train(), {"steps": 2, "every": 2, "warmup_steps": 1}
    trainer = new_trainer(target, cache, tmp_path / "work", drafter, {"held": cache}, **recipe)
    trainer.run(tmp_path / "out")
    (record,) = trainer.records
    assert record["score"] == pytest.approx((record["tau"] + record["tau_sampled"]) / 2)
    assert trainer.best["score"] == record["score"]
    assert Drafter.load(tmp_path / "out").dependency is not None


def lines_without_times(folder: Path) -> list[dict]:
    times = {"minutes", "tokens_s", "data_wait"}
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert all(times <= set(line) and line["gradient_norm"] > 0 for line in lines)
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def result(folder: Path) -> tuple[bytes, bytes, list[dict]]:
    """A training's best drafter and its log."""
    files = ("best/model.safetensors", "best/config.json")
    return (*((folder / name).read_bytes() for name in files), lines_without_times(folder))


def train(target, cache, folder: Path, display=None, **changes) -> Trainer:
    trainer = new_trainer(target, cache, folder, **changes)
    trainer.run(folder / "best", display)
    return trainer


@pytest.fixture(scope="module")
def whole(target, cache, tmp_path_factory):
    """A training that nothing disturbed, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return train(target, cache, folder), folder


def test_a_loss_or_gradient_that_is_not_finite_changes_no_weight(target, cache, tmp_path):
    """Clipping would spread it over all weights."""
    trainer = new_trainer(target, cache, tmp_path, every=2)
    weight, calls = trainer.drafter.layers[0].mlp.up_proj.weight, itertools.count(1)
    weight.register_hook(lambda grad: grad * (float("inf") if next(calls) == 4 else 1.0))
    for _ in range(3):
        trainer.keep(trainer.step())
    before = {n: w.clone() for n, w in trainer.drafter.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"gradient .* at step 3\."):
        trainer.keep(trainer.step())
    after = dict(trainer.drafter.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    trainer.drafter.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"loss .* at step 4\."):
        trainer.keep(trainer.step())


def test_a_run_ends_at_a_loss_that_is_not_finite_and_saves_nothing_of_it(target, cache, tmp_path):
    trainer = new_trainer(target, cache, tmp_path, every=2)
    weight, calls = trainer.drafter.layers[0].mlp.up_proj.weight, itertools.count(1)
    weight.register_hook(lambda grad: grad * (float("inf") if next(calls) == 4 else 1.0))
    with pytest.raises(FloatingPointError, match=r"at step 3\."):
        trainer.run(tmp_path / "best")
    trainer.checkpoints.wait()
    assert [path.name for path in saved_states(tmp_path)] == ["state-2"]


# Between checkpoints, and at one.
@pytest.mark.parametrize(("shown", "saved"), [(2, 3), (3, 3), (4, 5)])
def test_sigterm_saves_what_is_done_and_a_rerun_ends_the_same(
    target, cache, whole, tmp_path, shown, saved
):
    def terminate(trainer, report):
        if report["step"] + 1 == shown:  # of the step before the one that just ended
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(target, cache, tmp_path, terminate)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert saved_states(tmp_path)[-1].name == f"state-{saved}"
    resumed = new_trainer(target, cache, tmp_path)
    assert resumed.state["step"] == saved
    resumed.run(tmp_path / "best")
    states = [dict(each.drafter.state_dict()) for each in (whole[0], resumed)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert result(tmp_path) == result(whole[1])


def test_sigterm_ends_a_step_between_its_micro_batches(target, cache, whole, tmp_path):
    """A step of many samples would take longer than a scheduler waits."""
    trainer, seen = new_trainer(target, cache, tmp_path, micro_batch=1), []
    plain = trainer.train.states

    def states(indices):
        seen.append(indices)
        if len(seen) == 6:  # the second of the second step's four
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(indices)

    trainer.train = SimpleNamespace(**vars(cache), prefetch=cache.prefetch, states=states)
    with pytest.raises(SystemExit):
        trainer.run(tmp_path / "best")
    assert len(seen) == 6
    assert [path.name for path in saved_states(tmp_path)] == ["state-1"]
    resumed = train(target, cache, tmp_path)
    states = [dict(each.drafter.state_dict()) for each in (whole[0], resumed)]
    torch.testing.assert_close(*states)


def test_a_record_replaces_a_state_of_its_step_that_was_saved_without_one(target, cache, tmp_path):
    """As where SIGTERM came in the step before a checkpoint."""
    first = new_trainer(target, cache, tmp_path, steps=9, every=9)

    def terminate(trainer, report):
        if report["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        first.run(tmp_path / "best", terminate)
    (saved,) = saved_states(tmp_path)
    resumed = new_trainer(target, cache, tmp_path, steps=9, every=step_of(saved))
    resumed.run(tmp_path / "best")
    log = lines_without_times(tmp_path)
    assert [line["step"] for line in log] == [step_of(saved), 9]
    facts, _ = read_state(saved_states(tmp_path)[-1], {})
    assert [record["step"] for record in facts["records"]] == [step_of(saved), 9]
    assert not list(tmp_path.glob("*.replaced")) and not list(tmp_path.glob("*.partial"))


def test_a_kill_while_a_state_is_replaced_leaves_one(target, cache, tmp_path):
    new_trainer(target, cache, tmp_path, steps=1, every=1).run(tmp_path / "best")
    (tmp_path / "state-1").rename(tmp_path / "state-1.replaced")
    assert new_trainer(target, cache, tmp_path).state["step"] == 1
    assert [path.name for path in saved_states(tmp_path)] == ["state-1"]


def test_a_best_checkpoint_that_is_gone_is_no_longer_the_best(target, cache, tmp_path):
    given = {"held_out": {"held": cache}, "steps": 4, "every": 1, "keep": 1}
    trainer = new_trainer(target, cache, tmp_path, random_drafter(target).train(), **given)
    trainer.run(tmp_path / "best")
    best = tmp_path / f"state-{trainer.best['step']}"
    assert best.is_dir() and len(saved_states(tmp_path)) <= 2
    shutil.rmtree(best)
    if saved_states(tmp_path):
        resumed = new_trainer(target, cache, tmp_path, random_drafter(target), **given)
        assert resumed.best["step"] == 0 and best_weights(tmp_path) is None
        resumed.run(tmp_path / "best")


def test_sigterm_in_the_last_evaluation_of_a_stage_ends_the_command(target, cache, tmp_path):
    trainer = new_trainer(target, cache, tmp_path, steps=1, every=1)
    trainer.after_checkpoint = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        trainer.run(tmp_path / "best")
    assert ended.value.code == 143
    assert [path.name for path in saved_states(tmp_path)] == ["state-1"]


def test_sigterm_of_another_process_stops_this_one(target, cache, tmp_path):
    trainer = new_trainer(target, cache, tmp_path)
    plain, calls = trainer.world.sum, itertools.count(1)

    def with_another(tensor):
        if tensor.dtype == torch.float64 and next(calls) == 3:  # the second step's first message
            tensor[-1] += 1  # the request to stop
        return plain(tensor)

    trainer.world.sum = with_another
    with pytest.raises(SystemExit):
        trainer.run(tmp_path / "best")
    assert [path.name for path in saved_states(tmp_path)] == ["state-1"]


def test_a_kill_between_files_of_a_checkpoint_loses_neither(target, cache, tmp_path, monkeypatch):
    """A run that was cut before any of its renames and is resumed ends as an undisturbed one."""
    plain, few = Path.replace, {"steps": 3, "every": 1, "batch": 2, "anchors": 1, "keep": 2}

    def cut_before(number: int) -> list[str]:
        """Renames of one run, the last of them not done."""
        renamed: list[str] = []

        def cut(path, target):
            renamed.append(target.name)
            if len(renamed) == number + 1:
                raise KeyboardInterrupt
            return plain(path, target)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, "replace", cut)
            train(target, cache, tmp_path / f"cut-{number}", **few)
        return renamed

    every = cut_before(-1)
    states = ["state-1", "state-2", "state-3"]
    assert set(every) == {"model.safetensors", "config.json", "training_log.jsonl", *states}
    expected = result(tmp_path / "cut--1")
    for number, name in enumerate(every):
        assert cut_before(number)[-1] == name
        train(target, cache, tmp_path / f"cut-{number}", **few)
        folder = tmp_path / f"cut-{number}"
        assert result(folder) == expected, f"before rename {number}, {name}"
        assert [path.name for path in saved_states(folder)] == states[1:]


@pytest.mark.slow
def test_processes_follow_the_loss_of_one(target_dir, tmp_path):
    """On a step, micro batches of a process are several, or one."""
    losses = {}
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        config = small(folder, target_dir, steps=6, anchors=4, micro_batch=2)
        text = config.read_text().replace("every = 1", "every = 2")
        config.write_text(text.replace("batch = 2\n", "batch = 8\n", 1))
        counts = (", ".join(map(str, range(i, i + 9 + i % 3))) for i in range(12))
        rows = [{"instruction": f"Count {i}", "output": text} for i, text in enumerate(counts)]
        write_rows(folder / "a.jsonl", *rows)
        line = ["train", "--config", str(config), "--work", str(folder / "work"), "--threads", "1"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        torchrun += ["--master-port", "0", "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "sglang_hyperdflash"]
        ran = subprocess.run(torchrun + line, capture_output=True, text=True, timeout=PATIENCE)
        assert ran.returncode == 0, ran.stderr[-3000:]
        log = lines_without_times(folder / "work" / "stage-1")
        losses[size] = [line["loss"] for line in log]
    assert len(losses[1]) == 3 and losses[1][-1] < losses[1][0]
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)
    assert losses[4] == pytest.approx(losses[1], rel=1e-6)


@pytest.fixture
def _dynamo():
    """The CPU platform turns torch.compile off for SGLang in the whole process."""
    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_dynamo")
def test_compiled_layers_train_as_others(target, cache, tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (
        new_trainer(target, cache, tmp_path / str(on), random_drafter(target).train(), compile=on)
        for on in (False, True)
    )
    for _ in range(2):
        losses = [each.keep(each.step())["loss"] for each in (plain, compiled)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 2
    assert dict(compiled.drafter.state_dict()).keys() == dict(plain.drafter.state_dict()).keys()


def test_a_context_of_a_million_tokens_takes_no_table():
    with torch.device("meta"):
        drafter = Drafter(json.loads((SAMPLE / "drafter" / "config.json").read_text()))
    assert drafter.raw["max_position_embeddings"] == 2**20
    assert sum(buffer.nbytes for buffer in drafter.buffers()) < 2**20


def second(more: float = 0.0) -> ProcessGroup:
    """The second of two processes; the main one is at another step if ``more``."""
    world = ProcessGroup()
    world.size, world.rank, world.sum = 2, 1, lambda tensor: 2 * tensor + more
    world.synchronized = lambda module: module
    return world


def test_every_process_resumes_at_one_step(target, cache, tmp_path):
    new_trainer(target, cache, tmp_path / "has", steps=1, every=1).run(tmp_path / "best")
    given = (target, cache, {}, RECIPE)
    resumed = Trainer(new_drafter(target), *given, tmp_path / "has", second())
    assert resumed.state["step"] == 1
    with pytest.raises(HyperDFlashConfigError, match="has not"):
        Trainer(new_drafter(target), *given, tmp_path / "has not", second(1.0))


def test_processes_on_a_cpu_use_gloo_on_a_host_with_gpus(monkeypatch):
    """NCCL has no CPU tensors."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process_group.dist, "init_process_group", asked.append)
    monkeypatch.setattr(process_group.dist, "new_group", lambda backend: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for device in ("cpu", "cuda"):
        ProcessGroup(device)
    assert asked == ["gloo", "cpu:gloo,cuda:nccl"]
