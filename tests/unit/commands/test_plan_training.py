"""The cost of a training: formulas against counted steps, masks and captured tensors."""

import json

import pytest

from eval.step_flops import Step, count
from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.plan_training import products, visible_keys
from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.training.anchors import dense_mask, visible
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.samples import Sample, collate
from tests.unit.commands.builders import RECIPE, SAMPLE

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


def test_the_recipes_cost_is_a_table_and_json(capsys):
    def planned(*options: str) -> str:
        command = ["plan", "--draft", str(SAMPLE / "drafter"), "--training", str(RECIPE)]
        assert main([*command, "--conversations", "300000", "150000", *options]) == 0
        return capsys.readouterr().out

    first, second = json.loads(planned("--json"))
    assert first["bytes"] == 2 * second["bytes"] == 300_000 * 1000 * 32_772
    assert first["train"] == pytest.approx(2 * second["train"], rel=1e-3)
    hours = sum(stage[name] for stage in (first, second) for name in stage if name != "bytes")
    said = planned()
    assert all(f"{n} GPUs {hours / n / 24:.1f}" in said for n in (8, 16, 64))
    half = json.loads(planned("--states-dtype", "fp8", "--json"))
    assert [stage["bytes"] for stage in half] == [300_000_000 * 16_404, 150_000_000 * 16_404]
    assert half[0]["train"] == first["train"]
    slower = json.loads(planned("--utilization", "0.2", "--json"))
    assert slower[0]["train"] == pytest.approx(2 * first["train"])
