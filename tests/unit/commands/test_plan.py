"""``hyperdflash plan``'s own part; the sizing itself is in ``test_deepseek_v4_start.py``."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hyperdflash import cli
from sglang_hyperdflash.commands.plan import Budget, Node, Unavailable, report
from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.serving import draft_kv_size
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import DrafterShape
from tests.conftest import EXAMPLE, ROOT
from tests.documents import commands, fences, shell_fences
from tests.unit.serving.v4_shapes import DSPARK, FLASH, draft_folder, target_folder
from tests.warm_start.client import run_command

NODE = Node(gpu_gib=100, weights_gib=35, tp=4, mem_fraction=0.85)


def test_a_node_keeps_what_weights_leave():
    assert NODE.kv_bytes == 50 * 2**30


def test_the_report_compares_with_no_speculation_and_explains_every_byte():
    budgets = [
        Budget("none", 7000.0, 1_000_000, 0.0, requests=256),
        Unavailable("DSPARK", "not here"),
        Budget(
            "HYPERDFLASH", 9148.0, 750_000, 2048.0, 100.0, 48,
            {"fa3": 2**22, "triton": 2**31}, {"residual": 2**30}, (1, 7), 51,
        ),
    ]  # fmt: skip
    text = report(budgets, NODE)
    assert "50.0 GiB (tp 4; requests at a time: --max-running-requests)" in text
    assert "DSPARK        not here" in text
    extra = text[text.index("Besides") :].splitlines()
    assert extra[0].endswith("HYPERDFLASH takes at most (GiB; SGLang leaves 15.0):")
    assert [line.split()[0] for line in extra[1:-1]] == ["1.00", "2.00", "3.00"]
    assert extra[-1].endswith("own graphs, of 51 batch sizes at width 1, 7.")
    assert "draft attention at most (fa3 0.00, triton 2.00)" in extra[2]
    line = next(line for line in text.splitlines() if line.startswith("HYPERDFLASH"))
    assert line.split() == ["HYPERDFLASH", "9148", "7000", "100", "2048", "750,000", "75%", "48"]
    free = report(budgets, replace(NODE, max_running_requests=None))
    assert "requests at a time: SGLang's own choice" in free
    assert "requests differ: by default SGLang admits fewer with speculation" in free


SAMPLE = EXAMPLE.parent / "deepseek_v4_flash_config"


def test_the_shipped_sample_is_the_published_dimensions():
    found = json.loads((SAMPLE / "target" / "config.json").read_text())
    assert "no weights" in found.pop("_note")
    assert found == json.loads(json.dumps(FLASH))
    assert parse_config(json.loads((SAMPLE / "drafter" / "config.json").read_text())).window is None


@pytest.mark.parametrize(
    "extra, message",
    [
        ((), "--weights-gib is needed"),
        (("--weights-gib", "90"), "leaves no memory besides weights of 90 GiB"),
        (("--weights-gib", "-1"), "--weights-gib must be a number of at least 0, found -1"),
        (("--tp", "0"), "--tp must be at least 1, found 0"),
        (("--context-length", "0"), "--context-length must be at least 1, found 0"),
        (("--max-running-requests", "-2"), "--max-running-requests must be at least 1, found -2"),
        (("--gpu-gib", "nan"), "--gpu-gib must be a number above 0, found nan"),
        (("--mem-fraction-static", "85"), "--mem-fraction-static must be above 0 and at most 1"),
    ],
)
def test_what_a_plan_needs(tmp_path, capsys, extra, message):
    target = target_folder(tmp_path, FLASH)
    arguments = ["plan", "--target", str(target), "--draft", "nowhere", "--gpu-gib", "80"]
    assert cli.main([*arguments, *extra]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "its model.safetensors.index.json is not JSON"),
        (b"[]", "its model.safetensors.index.json must hold a JSON object"),
        (b'{"metadata": 3}', "--weights-gib is needed"),
        (b'{"metadata": {"total_size": "9"}}', "--weights-gib is needed"),
    ],
)
def test_a_damaged_index_is_one_line(tmp_path, capsys, content, message):
    """Found as: a JSONDecodeError's traceback."""
    target = target_folder(tmp_path, FLASH)
    (target / "model.safetensors.index.json").write_bytes(content)
    arguments = ["plan", "--target", str(target), "--draft", "nowhere", "--gpu-gib", "80"]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_other_targets_are_told_where_to_look(target_dir, drafter_dir, capsys):
    arguments = ["plan", "--target", str(target_dir), "--draft", str(drafter_dir)]
    assert cli.main([*arguments, "--gpu-gib", "80", "--weights-gib", "1"]) == 2
    assert "is not a DeepSeek-V4 target" in capsys.readouterr().err


def test_a_target_that_carries_dspark_is_compared_with_it(tmp_path):
    """The command itself, in a process of its own: SGLang's start-up is process-wide."""
    rows = planned(tmp_path, FLASH | DSPARK)
    assert [row["method"] for row in rows] == ["none", "HYPERDFLASH", "EAGLE", "DSPARK"]
    assert rows[1]["draft_bytes_per_token"] == 2 * 2 * 1 * 64 * 2
    graphs = {name: size / 2**30 for name, size in rows[1]["draft_graph_bytes"].items()}
    # One million tokens for each of 256 requests: int64, int32, and a page of 256 each. Triton has
    # 8 partial outputs of every row and head beside them, FlashInfer a plan of 8 MiB for each of 51
    # batch sizes and a workspace.
    partial = 4 * 256 * 7 * 4 * 8 * 65 / 2**30
    assert graphs["triton"] == pytest.approx(2 + partial, rel=1e-4)
    assert graphs["flashinfer"] == pytest.approx(1 + (51 * 8.125 + 384) / 1024, rel=1e-4)
    assert graphs["fa3"] == graphs["fa4"] == 1 / 256
    extra = {name: size / 2**30 for name, size in rows[1]["extra_bytes"].items()}
    assert extra["verification of sampled requests"] == pytest.approx(3.88, abs=0.01)
    assert extra["drafts' logits"] == pytest.approx(0.37, abs=0.01)
    assert extra["residual of the captured batches"] == pytest.approx(0.055, abs=0.001)
    # With the most expensive draft attention, in what SGLang leaves by default.
    assert sum(extra.values()) + graphs["triton"] < 0.15 * 141
    for name in ("draft_graph_bytes", "extra_bytes"):
        assert not rows[0][name] and not rows[2][name]
    assert rows[0]["tokens"] > rows[3]["tokens"] > 0
    # What the drafter's block allows by default; each has graphs of the target, of 51 batch sizes.
    assert (rows[1]["widths"], rows[1]["captured"]) == ([1, 7], 51)


def test_ranks_with_batches_of_their_own_have_graphs_of_whole_blocks_alone(tmp_path):
    rows = planned(tmp_path, FLASH | DSPARK, "--tp", "2", "--dp-attention")
    assert rows[1]["widths"] == [7]


def test_a_rival_that_does_not_start_is_listed_with_the_reason(tmp_path):
    """Refused where its arguments are resolved, and where its draft's K/V are counted."""
    rows = planned(tmp_path, FLASH | DSPARK | {"dspark_markov_rank": 0})
    assert "DSPARK requires markov_rank > 0" in rows[3]["reason"]
    assert rows[2]["tokens"] > rows[1]["tokens"] > 0


def run_plan(target: Path, draft: Path, *options: str) -> subprocess.CompletedProcess:
    command = ["plan", "--target", target, "--draft", draft, "--gpu-gib", 141, "--weights-gib", 40]
    return run_command(*command, *options, timeout=500)


def planned(folder: Path, shape: dict, *options: str) -> list[dict]:
    """What ``hyperdflash plan --json`` prints of a target and a drafter for V4-Flash."""
    target = target_folder(folder / "target", shape)
    draft = draft_folder(folder / "draft", FLASH, DrafterShape(layers=2, kv_heads=1))
    ended = run_plan(target, draft, "--json", *options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout[ended.stdout.index("[\n") :])


def test_the_shipped_sample_is_planned_as_the_pages_print_it():
    page = ROOT / "docs" / "serving.md"
    shell = shell_fences([page, SAMPLE / "README.md"])
    (command,) = {fence.text for fence in shell if SAMPLE.name in fence.text}
    (words,) = commands(next(fence for fence in shell if fence.text == command))
    assert words[:2] == ["hyperdflash", "plan"]
    ended = run_command(*words[1:], cwd=ROOT, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    shown = [fence.text for fence in fences(page) if fence.mark == "output of hyperdflash plan"]
    assert shown
    for block in shown:
        assert block in ended.stdout, ended.stdout
    lines = {line.split()[0]: line.split() for line in ended.stdout.splitlines() if line.strip()}
    none, hyper = lines["none"], lines["HYPERDFLASH"]
    total, own, rings, draft = map(int, hyper[1:5])
    assert own == int(none[1]) > 0
    assert rings > 0
    assert draft == 5 * 2 * 8 * 128 * 2  # layers, K and V, heads, width, bf16
    assert abs(total - own - rings - draft) <= 1
    assert (none[-1], hyper[-1]) == ("256", "256"), "what SGLang chooses for V4"
    assert "requests at a time: SGLang's own choice" in ended.stdout


@pytest.mark.parametrize("field", ["head_dim", "compress_ratios", "index_head_dim"])
def test_a_target_with_a_field_missing_is_one_line(tmp_path, capsys, field):
    """Found as: a traceback, or a plan by a default that is not the target's."""
    target = target_folder(tmp_path, {k: v for k, v in FLASH.items() if k != field})
    arguments = ["plan", "--target", str(target), "--draft", str(SAMPLE / "drafter")]
    assert cli.main([*arguments, "--gpu-gib", "141", "--weights-gib", "40"]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"the config.json of {target} lacks {field}" in message


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "nan"])
def test_a_wrong_pool_ratio_is_refused(monkeypatch, text):
    monkeypatch.setenv(draft_kv_size.POOL_RATIO, text)
    with pytest.raises(HyperDFlashConfigError, match="above 0 and at most 1"):
        draft_kv_size.pool_ratio()


@pytest.mark.parametrize("window, expected", [(None, 20480), (512, 2048)])
def test_a_window_shrinks_the_cell(monkeypatch, window, expected):
    monkeypatch.delenv(draft_kv_size.POOL_RATIO, raising=False)
    config = SimpleNamespace(hyperdflash_config={"window": window})
    aux = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    kvc = SimpleNamespace(spec_aux_config=aux)
    assert draft_kv_size.draft_cell_size(lambda kvc: 20480, kvc) == expected
    none = SimpleNamespace(spec_aux_config=SimpleNamespace(draft_model_config=None))
    assert draft_kv_size.draft_cell_size(lambda kvc: 0, none) == 0
