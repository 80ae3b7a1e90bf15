"""``hyperdflash plan``'s own part; the sizing itself is in ``test_deepseek_v4.py``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hyperdflash import cli
from sglang_hyperdflash.commands.plan import Budget, Node, report
from sglang_hyperdflash.serving.draft_kv import size
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import DrafterShape
from tests.conftest import EXAMPLE, ROOT
from tests.documents import commands, fences, shell_fences
from tests.unit.serving.v4_shapes import DSPARK, FLASH, draft_folder, target_folder
from tests.waiting import PATIENCE
from tests.warm_start.client import run_command

NODE = Node(gpu_gib=100, weights_gib=35, tp=4, mem_fraction=0.85)


def test_a_node_keeps_what_weights_leave():
    assert NODE.kv_bytes == 50 * 2**30


def test_the_report_compares_with_the_baseline_at_each_size():
    rows = [
        Budget("baseline", 4, 7000.0, 0.0, 1_000_000, 256),
        Budget("DSPARK", 4, reason="not here"),
        Budget(
            "HYPERDFLASH", 4, 9148.0, 2048.0, 750_000, 48,
            {"fa3": 2**22, "triton": 2**31}, {"residual": 2**30}, (1, 7), 51,
        ),
        Budget("baseline", 8, 7000.0, 0.0, 500_000, 256),
        Budget("EAGLE", 8, 7900.0, 180.0, 400_000, 256),
        Budget("DSPARK", 8, reason="not here"),
    ]  # fmt: skip
    lines = [line.split() for line in report(rows).splitlines()]
    assert lines[2] == ["4", "HYPERDFLASH", "9,148", "2,048", "750,000", "75%", "48", "3.00"]
    assert lines[4] == ["8", "EAGLE", "7,900", "180", "400,000", "80%", "256"]
    assert lines[5:] == [["DSPARK:", "not", "here"]]


SAMPLE = EXAMPLE.parent / "deepseek_v4_flash_config"


def test_the_shipped_sample_is_the_published_dimensions():
    found = json.loads((SAMPLE / "target" / "config.json").read_text())
    assert "no weights" in found.pop("_note")
    assert found == json.loads(json.dumps(FLASH))
    with_draft = json.loads((SAMPLE / "dspark" / "config.json").read_text())
    assert "no weights" in with_draft.pop("_note")
    assert with_draft == json.loads(json.dumps(FLASH | DSPARK))


@pytest.mark.parametrize(
    "extra, message",
    [
        ((), "--weights-gib is needed"),
        (("--weights-gib", "90"), "leaves no memory besides weights of 90 GiB per GPU at tp 1"),
    ],
)
def test_what_a_plan_needs(tmp_path, capsys, extra, message):
    target = target_folder(tmp_path, FLASH)
    arguments = ["plan", "--target", str(target), "--draft", "nowhere", "--gpu-gib", "80"]
    assert cli.main([*arguments, *extra]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--weights-gib", "-1", "at least 0"),
        ("--tp", "0", "at least 1"),
        ("--context-length", "0", "at least 1"),
        ("--max-running-requests", "-2", "at least 1"),
        ("--gpu-gib", "nan", "at least 0"),
        ("--mem-fraction-static", "85", "above 0 and at most 1"),
    ],
)
def test_a_number_that_no_node_has_is_one_line(capsys, option, value, expected):
    arguments = ["plan", "--target", "any", "--draft", "nowhere", "--gpu-gib", "80"]
    with pytest.raises(SystemExit, match="2"):
        cli.main([*arguments, option, value])
    error = capsys.readouterr().err
    assert f"{option}: must be {expected}, found {value}." in error and error.count("\n") == 1


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
    return run_command(*command, *options, timeout=PATIENCE)


def planned(folder: Path, shape: dict, *options: str) -> list[dict]:
    """What ``hyperdflash plan --json`` prints of a target and a drafter for V4-Flash."""
    target = target_folder(folder / "target", shape)
    draft = draft_folder(folder / "draft", FLASH, DrafterShape(layers=2, kv_heads=1))
    ended = run_plan(target, draft, "--json", *options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout[ended.stdout.index("[\n") :])


def test_the_shipped_sample_is_planned_as_the_pages_print_it():
    """The default drafter of DeepSeek-V4-Flash: K/V tokens as shares of the baseline's."""
    page = ROOT / "docs" / "serving.md"
    shell = shell_fences([page, SAMPLE / "README.md"])
    (command,) = {fence.text for fence in shell if SAMPLE.name in fence.text}
    (words,) = commands(next(fence for fence in shell if fence.text == command))
    assert words[:2] == ["hyperdflash", "plan"]
    ended = run_command(*words[1:], cwd=ROOT, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (shown,) = [fence.text for fence in fences(page) if fence.mark == "output of hyperdflash plan"]
    assert shown in ended.stdout, ended.stdout
    lines = [line.split() for line in shown.splitlines()[1:]]
    found = {(int(tp), name): (own, draft, share) for tp, name, own, draft, _, share, *_ in lines}
    # Layers, K and V, heads, width, bf16; a tenth of the slots; heads are split over the GPUs.
    # Tables of the window: one number for each token, and for each slot.
    draft = {tp: 5 * 2 * 8 * 128 * 2 // 10 // tp + 9 for tp in (1, 4, 8)}
    for tp, share in ((1, "70%"), (4, "83%"), (8, "85%")):
        assert found[tp, "baseline"] == ("7,087", "0", "100%")
        own = f"{7087 + 672 + draft[tp]:,}"
        assert found[tp, "HYPERDFLASH"] == (own, f"{draft[tp]:,}", share)
        assert found[tp, "EAGLE"] == found[tp, "DSPARK"] == ("7,939", "180", "86%")


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
    monkeypatch.setenv(size.POOL_RATIO, text)
    with pytest.raises(HyperDFlashConfigError, match="above 0 and at most 1"):
        size.pool_ratio()


@pytest.mark.parametrize("window, expected", [(None, 20480), (512, 2048 + 9)])
def test_a_window_shrinks_the_cell(monkeypatch, window, expected):
    monkeypatch.delenv(size.POOL_RATIO, raising=False)
    config = SimpleNamespace(hyperdflash_config={"window": window})
    aux = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    kvc = SimpleNamespace(spec_aux_config=aux)
    assert size.draft_cell_size(lambda kvc: 20480, kvc) == expected
    none = SimpleNamespace(spec_aux_config=SimpleNamespace(draft_model_config=None))
    assert size.draft_cell_size(lambda kvc: 0, none) == 0
