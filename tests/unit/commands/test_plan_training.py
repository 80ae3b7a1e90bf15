"""The cost of a training: formulas against counted steps, masks and captured tensors."""

import inspect
import json

import pytest
import torch

from eval.step_flops import Cost, Step, count
from sglang_hyperdflash.cli import build_parser, main
from sglang_hyperdflash.commands.plan_training import (
    GROUP,
    attention,
    batch_operations,
    drawn,
    products,
    replay_operations,
    step_operations,
    visible_keys,
)
from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.training.anchors import dense_mask, visible
from sglang_hyperdflash.training.deal import deal
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.recipe import read_schedule
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import InMemory, Sample, States, collate
from tests.unit.commands.builders import RECIPE, SAMPLE
from tests.unit.training.streams import random_drafter

RAW = json.loads((SAMPLE / "drafter" / "config.json").read_bytes())
HEADLESS = json.loads(json.dumps(RAW))
del HEADLESS["hyperdflash_config"]["dependency"]


@pytest.mark.heavy
@pytest.mark.parametrize("raw", [RAW, HEADLESS], ids=["head", "no head"])
@pytest.mark.parametrize("fields", [{"loss": "ce_kl"}, {"loss": "acceptance"}, {"alpha": 0.0}])
def test_products_are_those_of_a_counted_step(raw, fields):
    step = Step(samples=2, tokens=300, prompt=100, anchors=40)
    objective = Objective(**fields).resolved(parse_config(raw))
    rows = collate([Sample.continuation(list(range(300)), 100)] * 2)
    blocks = Blocks.draw(rows, step.anchors, raw["block_size"], [0, 1])
    taught = 6 if objective.taught is None else objective.taught
    drafts, keep = int(blocks.supervised.sum()), blocks.keep.numel()
    rows = {
        "drafts": drafts,
        "taught": int(blocks.supervised[..., :taught].sum()),
        "scored": drafts,
    }
    formula = products(raw, tokens=2 * step.tokens, blocks=keep, **rows)
    assert count(raw, step, objective).by_dtype.total() == formula


@pytest.mark.parametrize("window", [None, 30])
def test_visible_keys_are_those_of_the_mask(window):
    rows = collate([Sample.continuation(list(range(90)), 20)])
    blocks = Blocks.draw(rows, 90, 7, [0])
    n = blocks.keep.numel()
    may_attend = visible(blocks.anchors, blocks.keep, 90, 7, window)
    mask = dense_mask(may_attend, 1, 7 * n, 90 + 7 * n, "cpu")
    expected = mask.sum().item() / mask.shape[1]
    assert visible_keys(90, 70, 7, window) == pytest.approx(expected)


@pytest.fixture
def planned(capsys):
    """What ``plan --training`` prints of the recipe, or of another file."""

    def run(*options: str, training=RECIPE) -> str:
        command = ["plan", "--draft", str(SAMPLE / "drafter"), "--training", str(training)]
        assert main([*command, "--conversations", "300000", "150000", *options]) == 0
        return capsys.readouterr().out

    return run


def stages(planned, *options: str, gpus: int = 8) -> list[dict]:
    return json.loads(planned("--json", "--gpus", str(gpus), *options))[str(gpus)]


def test_the_recipes_cost_is_a_table_and_json(planned):
    first, second = stages(planned)
    assert first["TB stored"] == 2 * second["TB stored"] == 0.3 * 1000 * 32_772 / 1e6
    assert first["TB read"] == pytest.approx((5 * 300_000 + 47 * 1000) * 32_772_000 / 1e12)
    assert first["train"] == pytest.approx(2 * second["train"], rel=1e-3)
    parts = list(first)[:5]
    assert first["GPU hours"] == pytest.approx(sum(first[name] for name in parts))
    said = planned()
    for gpus in (8, 16):
        hours = sum(stage["GPU hours"] for stage in stages(planned, gpus=gpus))
        assert f"{gpus} GPUs {hours / gpus / 24:.1f}" in said
    half = stages(planned, "--states-dtype", "fp8")
    assert [x["TB stored"] for x in half] == [0.3 * 16_404 / 1e3, 0.15 * 16_404 / 1e3]
    assert half[0]["train"] == first["train"]
    slower = stages(planned, "--utilization", "0.2")
    assert slower[0]["train"] == pytest.approx(2 * first["train"])


def test_gpus_that_cannot_share_a_batch_get_no_days(planned):
    costs = json.loads(planned("--json"))
    assert set(costs) == {"8", "16", "64"} and isinstance(costs["16"], list)
    assert "32" in costs["64"] and "64" in costs["64"]
    assert costs["64"] in planned() and "64 GPUs 0" not in planned()


@pytest.mark.parametrize("gpus", [1, 8])
def test_padding_and_waiting_are_those_that_deal_gives(planned, gpus):
    """The network's rows are padded, and a step takes as long as the busiest GPU."""
    args = build_parser().parse_args(["plan", "--spread", "0.6"])
    stage, objective = read_schedule(RECIPE).stage[0], Objective(loss="ce_kl")
    steps, needed = [], []
    for batch in drawn(args, stage.batch):
        rows = [tokens + 7 * min(512, answer) for tokens, answer in batch]
        loads = []
        for share in deal(rows, gpus, stage.micro_batch):
            loads.append(0.0)
            for part in ([batch[i] for i in part] for part in share):
                blocks, size = [min(512, answer - 1) for _, answer in part], len(part)
                counts = (sum(blocks) * n for n in (6, 2, 6))
                padded = size * max(n for n, _ in part), size * max(blocks)
                loads[-1] += products(RAW, *padded, *counts)
                loads[-1] += 3.5 * attention(RAW, part, 512)
        steps.append(max(loads))
        needed.append(sum(batch_operations(RAW, objective, 512, [x]) for x in batch) / gpus)
    mean = sum(steps) / len(steps)
    assert step_operations(args, RAW, objective, stage, gpus) == pytest.approx(mean)
    assert sum(needed) < sum(steps) < 1.3 * sum(needed)
    hours = stages(planned, "--spread", "0.6", gpus=gpus)[0]["train"]
    assert hours == pytest.approx(gpus * 46_875 * mean / (0.4 * 989e12) / 3600)


def test_equal_lengths_are_not_padded():
    args = build_parser().parse_args(["plan", "--spread", "0"])
    stage, objective = read_schedule(RECIPE).stage[0], Objective(loss="ce_kl")
    alone = batch_operations(RAW, objective, 512, [(1000, 800)])
    assert step_operations(args, RAW, objective, stage, 8) == pytest.approx(4 * alone)


def test_what_waits_for_the_disk_takes_the_disks_time(planned):
    """Reading and writing are shared by all GPUs: more of them wait longer."""
    slow = "--read-rate", "0.1", "--write-rate", "0.1"
    for gpus in (8, 16):
        first = stages(planned, *slow, gpus=gpus)[0]
        seconds = 46_875 * 32 * 32_772_000 / 1e8
        assert first["train"] == pytest.approx(gpus * seconds / 3600)
        assert first["evaluate"] == pytest.approx(gpus * 47 * 1000 * 32_772_000 / 1e8 / 3600)
        assert first["capture"] == pytest.approx(gpus * 300_000 * 32_772_000 / 1e8 / 3600)


def test_a_budget_bounds_the_disk_alone(planned):
    whole, bounded = stages(planned), stages(planned, "--budget", "900")
    assert [x.pop("TB stored") for x in bounded] == [900 * 2**30 / 1e12] * 2
    assert stages(planned, "--budget", "20000") == whole
    assert all(x.pop("TB stored") > 1 for x in whole) and bounded == whole


def test_a_file_without_held_out_conversations_evaluates_nothing(planned, tmp_path):
    file = tmp_path / "train.toml"
    lines = RECIPE.read_text().splitlines()
    kept = [x for x in lines if not x.startswith(("[held_out]", "benchmarks"))]
    file.write_text("\n".join(kept))
    first, _ = json.loads(planned("--json", training=file))["8"]
    assert first["evaluate"] == 0 and first["TB read"] == 1.5e6 * 32_772_000 / 1e12


@pytest.mark.parametrize("rank", [None, 8])
def test_an_evaluations_operations_are_those_of_a_replay(target_dir, rank):
    """But for gates, which are small, and for attention, which is no product."""
    target = LocalTarget(target_dir)
    drafter = random_drafter(target, dependency_rank=rank)
    samples = [Sample.continuation(list(range(10, 10 + n)), 30) for n in (90, 120, 60, 200, 75)]
    source, residual = InMemory(samples), torch.zeros(5, 200, drafter.config.source_width)
    source.states = lambda indices: States.without_layers(residual[indices])
    with Cost(target) as cost:
        Replay(drafter, target).measure(source, sampled=rank is not None)
    lengths = [(len(sample.tokens), sample.answer_tokens) for sample in samples]
    assert len(lengths) <= GROUP == inspect.signature(Replay.measure).parameters["batch"].default
    attended = attention(drafter.raw, lengths) * (1 if rank is None else 2)
    formula = replay_operations(drafter.raw, lengths) - attended
    assert formula == pytest.approx(cost.by_dtype.total(), rel=0.03)
