"""The cost of a training: formulas against counted steps, masks and captured tensors."""

from __future__ import annotations

import json

import pytest
import torch

from eval.step_flops import Step, count
from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.plan_training import (
    Conversation,
    captured_bytes,
    products,
    visible_keys,
)
from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.training.anchors import dense_mask, visible
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.samples import Sample, collate
from tests.conftest import ROOT

DRAFT = ROOT / "examples/deepseek_v4_flash_config/drafter"
RECIPE = ROOT / "examples/recipes/deepseek_v4_flash.toml"
RAW = json.loads((DRAFT / "config.json").read_bytes())


def without_head() -> dict:
    raw = json.loads(json.dumps(RAW))
    del raw["hyperdflash_config"]["dependency"]
    return raw


@pytest.mark.parametrize("raw", [RAW, without_head()], ids=["head", "no head"])
@pytest.mark.parametrize(
    "objective", [Objective(loss="ce_kl"), Objective(loss="acceptance"), Objective(alpha=0.0)]
)
def test_products_are_those_of_a_counted_step(raw, objective):
    step = Step(samples=2, tokens=300, prompt=100, anchors=40)
    objective = objective.resolved(parse_config(raw))
    rows = collate([Sample.continuation(list(range(300)), 100)] * 2)
    blocks = Blocks.draw(rows, step.anchors, raw["block_size"], [0, 1])
    taught = 6 if objective.taught is None else objective.taught
    drafts = int(blocks.supervised.sum())
    formula = products(
        raw,
        tokens=2 * step.tokens,
        blocks=blocks.keep.numel(),
        drafts=drafts,
        taught=int(blocks.supervised[..., :taught].sum()),
        own=drafts,
    )
    assert sum(count(raw, step, objective).values()) == formula


@pytest.mark.parametrize("window", [None, 30])
def test_visible_keys_are_those_of_the_mask(window):
    rows = collate([Sample.continuation(list(range(90)), 20)])
    blocks = Blocks.draw(rows, 90, 7, [0])
    n = blocks.keep.numel()
    may_attend = visible(blocks.anchors, blocks.keep, 90, 7, window)
    mask = dense_mask(may_attend, 1, 7 * n, 90 + 7 * n, "cpu")
    expected = mask.sum().item() / mask.shape[1]
    assert visible_keys(Conversation(90, 70), 7, window) == pytest.approx(expected)


def test_bytes_are_those_of_the_tensors():
    residual = torch.empty(10, 4, RAW["hidden_size"], dtype=torch.bfloat16)
    tokens = torch.empty(10, dtype=torch.int32).nbytes
    assert captured_bytes(RAW, 10) == residual.nbytes + tokens
    fp8 = (residual.to(torch.float8_e4m3fn), torch.empty(10, 4))
    assert captured_bytes(RAW, 10, fp8=True) == sum(x.nbytes for x in fp8) + tokens


def planned(capsys, *options: str) -> str:
    assert main(["plan", "--draft", str(DRAFT), "--training", str(RECIPE), *options]) == 0
    return capsys.readouterr().out


def test_the_recipes_cost_is_a_table_and_json(capsys):
    counts = ("--conversations", "300000", "150000")
    first, second = json.loads(planned(capsys, *counts, "--json"))
    assert first["bytes"] == 2 * second["bytes"] == 300_000 * 1000 * 32_772
    assert first["train"] == pytest.approx(2 * second["train"], rel=1e-3)
    hours = sum(stage[name] for stage in (first, second) for name in stage if name != "bytes")
    said = planned(capsys, *counts)
    assert (
        f"8 GPUs {hours / 192:.1f}; 16 GPUs {hours / 384:.1f}; 64 GPUs {hours / 1536:.1f}" in said
    )
    assert "assumed: 40% of 989 TFLOP/s" in said
    half = json.loads(planned(capsys, *counts, "--states-dtype", "fp8", "--json"))
    assert [stage["bytes"] for stage in half] == [300_000_000 * 16_404, 150_000_000 * 16_404]
    assert half[0]["train"] == first["train"]
    slower = json.loads(planned(capsys, *counts, "--utilization", "0.2", "--json"))
    assert slower[0]["train"] == pytest.approx(2 * first["train"])


@pytest.mark.parametrize(
    "options, message",
    [
        (("--conversations", "1", "2", "3"), "one for each of the 2 stages"),
        (("--answer-tokens", "2000"), "expected 2 to --tokens 1000, found 2000"),
    ],
)
def test_numbers_that_do_not_fit_are_one_line(capsys, options, message):
    assert main(["plan", "--draft", str(DRAFT), "--training", str(RECIPE), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_memory_still_needs_a_gpu(capsys):
    assert main(["plan", "--draft", str(DRAFT), "--target", "any"]) == 2
    assert "--gpu-gib is needed" in capsys.readouterr().err
