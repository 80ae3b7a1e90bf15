"""``hyperdflash plan``'s own part; the sizing itself is in ``test_deepseek_v4.py``."""

import json
import logging
import warnings
from pathlib import Path

import pytest

from sglang_hyperdflash.commands import plan
from sglang_hyperdflash.serving import settings
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import DrafterShape
from tests.conftest import ROOT
from tests.documents import commands, fences, shell_fences
from tests.unit.commands.builders import SAMPLE
from tests.unit.serving.v4_shapes import DSPARK, FLASH, draft_folder, target_folder
from tests.waiting import PATIENCE
from tests.warm_start.client import run_command

pytestmark = pytest.mark.heavy


def planned(folder: Path, shape: dict, *options: str) -> list[dict]:
    """What ``plan --json`` prints, in a process of its own: SGLang's start-up is process-wide."""
    target = target_folder(folder / "target", shape)
    draft = draft_folder(folder / "draft", FLASH, DrafterShape(layers=2, kv_heads=1))
    command = ["plan", "--target", target, "--draft", draft, "--gpu-gib", 141, "--weights-gib", 40]
    ended = run_command(*command, "--json", *options, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def test_a_target_that_carries_dspark_is_compared_with_it(tmp_path):
    rows = planned(tmp_path, FLASH | DSPARK)
    assert [row["method"] for row in rows] == ["baseline", "HYPERDFLASH", "EAGLE", "DSPARK"]
    assert rows[1]["draft_bytes_per_token"] == 2 * 2 * 1 * 64 * 2
    graphs = {name: size / 2**30 for name, size in rows[1]["draft_graph_bytes"].items()}
    # One million tokens for each of 256 requests: int64, int32, and a page of 256 each. Triton adds
    # 8 partial outputs of every row and head, FlashInfer a plan of 8 MiB for each of 51
    # batch sizes and a workspace.
    partial = 4 * 256 * 7 * 4 * 8 * 65 / 2**30
    assert graphs["triton"] == pytest.approx(2 + partial, rel=1e-4)
    assert graphs["flashinfer"] == pytest.approx(1 + (51 * 8.125 + 384) / 1024, rel=1e-4)
    assert graphs["fa3"] == graphs["fa4"] == 1 / 256
    extra = {name: size / 2**30 for name, size in rows[1]["extra_bytes"].items()}
    assert extra["verification of sampled requests"] == pytest.approx(2.80, abs=0.01)
    assert extra["drafts' logits"] == pytest.approx(0.37, abs=0.01)
    assert extra["residual of the captured batches"] == pytest.approx(0.055, abs=0.001)
    assert extra["counts of requests with penalties"] < 0.13 and extra["drafts' candidates"] < 0.01
    # With the most expensive draft attention, in what SGLang leaves by default.
    assert sum(extra.values()) + graphs["triton"] < 0.15 * 141
    for name in ("draft_graph_bytes", "extra_bytes"):
        assert not rows[0][name] and not rows[2][name]
    assert rows[0]["tokens"] > rows[3]["tokens"] > 0
    # What the drafter's block allows by default; each has graphs of the target, of 51 batch sizes.
    assert (rows[1]["widths"], rows[1]["captured"]) == ([1, 7], 51)


def test_a_rival_that_does_not_start_is_listed_beside_separate_ranks(tmp_path):
    shape = FLASH | DSPARK | {"dspark_markov_rank": 0}
    rows = planned(tmp_path, shape, "--tp", "2", "--dp-attention")
    assert "markov_rank" in rows[3]["reason"]
    assert rows[2]["tokens"] > rows[1]["tokens"] > 0
    assert rows[1]["widths"] == [1, 7]


@pytest.mark.slow
def test_the_shipped_sample_is_planned_as_the_pages_print_it():
    """Every method's bytes, tokens and share of the default drafter of DeepSeek-V4-Flash."""
    page = ROOT / "docs" / "serving.md"
    shell = shell_fences([page, SAMPLE / "README.md"])
    (words,) = commands(next(fence for fence in shell if SAMPLE.name in fence.text))
    assert words[:2] == ["hyperdflash", "plan"]
    ended = run_command(*words[1:], cwd=ROOT, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (shown,) = [fence.text for fence in fences(page) if fence.mark == "output of hyperdflash plan"]
    assert shown in ended.stdout, ended.stdout


def test_logs_are_shown_only_if_sizing_fails(capfd):
    with plan.logs_held_back():
        logging.getLogger("sglang").warning("all is well")
    with pytest.raises(ValueError), plan.logs_held_back():
        logging.getLogger("sglang").warning("the pool is small")
        warnings.warn("old", RuntimeWarning, stacklevel=1)
        raise ValueError
    said = capfd.readouterr().err
    assert "the pool is small" in said and "old" in said and "well" not in said


def test_a_wrong_pool_ratio_is_refused(monkeypatch):
    for text in ("0", "-1", "1.5", "many", "nan"):
        monkeypatch.setenv(settings.POOL_RATIO, text)
        with pytest.raises(HyperDFlashConfigError, match=settings.POOL_RATIO):
            settings.read_pool_ratio()
