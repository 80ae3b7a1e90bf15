"""The scripts that made the tiny target and its drafters, each on a few prompts or stubs."""

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import load_config, parse_config
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.training.recipe import read_schedule
from tests.conftest import EXAMPLE

pytestmark = pytest.mark.heavy


@pytest.mark.slow
def test_a_target_s_training_resumes_from_its_state(script, target_dir, tmp_path, monkeypatch):
    pretrain = script("pretrain")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(pretrain, "HELD_OUT_PER_FAMILY", 1)
    monkeypatch.setattr(pretrain, "ROWS", 2)
    args = SimpleNamespace(out=target_dir, work=tmp_path, layers=2, expert_width=32)
    first = pretrain.Run(args)
    first.step(1.0)
    first.save()
    expected = first.step(1.0)
    resumed = pretrain.Run(args)
    assert resumed.step(1.0) == expected and resumed.state["step"] == 2


@pytest.mark.slow
def test_answers_are_kept_and_other_prompts_are_refused(script, monkeypatch, tmp_path):
    corpus, own_answers = script("corpus"), script("own_answers")
    monkeypatch.setattr(corpus, "PER_FAMILY", {"train": 4, "held_out": 2})
    monkeypatch.setattr(corpus, "SCRAMBLED_PROMPTS", {"train": 20, "held_out": 12})
    monkeypatch.setattr(own_answers, "MAX_NEW", 12)
    monkeypatch.setattr(own_answers, "MAX_PROMPT", 48)
    out = tmp_path / "answers"
    own_answers.write_answers(out, per_kind=2, held_out=1)
    before = {path.name: path.read_text() for path in out.glob("*.jsonl")}
    lines = [json.loads(line) for text in before.values() for line in text.splitlines()]
    assert len(before) == 10 and lines
    for line in lines:
        (sample,) = line["samples"]
        ((start, end),) = sample["spans"]
        assert 8 <= end - start <= 12 and end == len(sample["tokens"])
    (out / "greedy.jsonl").unlink()
    (out / "sampled.jsonl").write_text("kept\n")
    own_answers.write_answers(out, per_kind=2, held_out=1)
    assert (out / "greedy.jsonl").read_text() == before["greedy.jsonl"]
    assert (out / "sampled.jsonl").read_text() == "kept\n"
    with pytest.raises(HyperDFlashError, match="held_out"):
        own_answers.write_answers(out, per_kind=2, held_out=2)
    # Prompts come family by family in turn; those that are chosen are of all of them.
    chosen = own_answers.spread([[i] for i in range(240)], 60)
    assert len({i % 12 for (i,) in chosen}) == 12


def test_a_retrained_drafter_that_is_worse_fails(script, call, monkeypatch, tmp_path):
    retrain, taus = script("retrain"), {"committed": {"math": 3.0, "code": 4.0}}
    monkeypatch.setattr(retrain, "write_answers", lambda *_: None)
    monkeypatch.setattr(retrain, "train_drafter", lambda *_, **__: None)
    monkeypatch.setattr(retrain, "compare", lambda out: taus)
    for name, retrained, code in (("worse", 2.9, 1), ("better", 3.1, 0)):
        taus["retrained"] = {"math": retrained, "code": 4.0}
        assert call("retrain", "--out", tmp_path / name) == code
        assert json.loads((tmp_path / name / "report.json").read_text())["tau"] == taus
    with pytest.raises(SystemExit):  # a folder with files
        call("retrain", "--out", tmp_path / "better")
    with pytest.raises(SystemExit, match="--budget-minutes"):
        call("retrain", "--out", tmp_path / "new", "--budget-minutes", retrain.RESERVE_MINUTES)


@pytest.mark.parametrize(
    "name, committed, loss",
    [("hyperdflash2", "drafter", "ce_kl"), ("dspark-style", "dspark_style", "acceptance")],
)
def test_a_study_s_variant_and_its_training_file_fit(script, tmp_path, name, committed, loss):
    study, answers, folder = script("study"), tmp_path / "answers", tmp_path / "run"
    answers.mkdir()
    for part in ("greedy", "sampled", "held_out_math"):
        (answers / f"{part}.jsonl").write_text("{}\n")
    variant, made = study.VARIANTS[name], ["--target", str(study.TARGET), *study.SHAPE]
    assert main(["init", *made, "--out", str(folder / "new"), *variant.init]) == 0
    config = load_config(folder / "new")
    raw = json.loads((EXAMPLE / committed / "config.json").read_text())
    assert config == parse_config(raw | {"architectures": ["HyperDFlashDraftModel"]})
    schedule = read_schedule(study.training_file(variant, folder, answers, seed=3, steps=7))
    assert schedule.objective.resolved(config).loss == loss
    (stage,) = schedule.stage
    assert (stage.seed, stage.steps, set(schedule.held_out)) == (3, 7, {"math"})
    assert schedule.draft == folder / "new" and schedule.out == folder / "trained"


def test_a_study_s_ratio_is_the_mean_of_the_seeds(script):
    def run(tau: float) -> dict:
        """Two sets of two prompts; one prompt of each accepts a tenth more, one a tenth less."""
        counts = {
            name: [[n * 100, round(n * 100 * (tau - 1 + more + by))] for by in (0.1, -0.1)]
            for name, n, more in (("a", 3, -0.5), ("b", 1, 0.5))
        }
        return {"counts": {"0": counts}, "identical": 4, "answers": 4, "repeats": 1, "steps": 400}

    taus = {"0": 4.4, "1": 5.0}
    seeds = {n: {"hyperdflash": run(4.0), "hyperdflash2": run(tau)} for n, tau in taus.items()}
    study = script("study")
    text = study.render({"seeds": seeds, "nats": {"0": {"a": 0.0, "b": 1.5}}})
    row = text[text.index("## Over hyperdflash\n") :].splitlines()[5]
    assert row.startswith("| hyperdflash2 | 4.45 | 1.19x (")
    assert row.endswith(f"; {4.15 / 3.75:.2f}, {4.75 / 3.75:.2f}) |")
    drafts = [1, 2], [0, 0, 3], [4], [0, 1, 1]
    answers = [{"meta_info": {"spec_correct_drafts_histogram": each}} for each in drafts]
    assert study.counts_of(answers, 2) == [[7, 2], [5, 9]]
