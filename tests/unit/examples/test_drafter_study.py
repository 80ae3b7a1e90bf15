"""The drafters' study: every variant is a drafter and a training file that the commands take."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.training.recipe import read_schedule
from tests.conftest import EXAMPLE

MADE = ("hyperdflash2", "hyperdflash", "dspark", "dflash2", "dflash", "causal", "block 5")
# Against the paper's drafter: what differs in the draft config or the objective.
PARTS = {
    "fc": {"reducer"},
    "no KL": {"alpha"},
    "dflash": {"reducer", "source", "captured_layers"},
}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import drafter_study

    return drafter_study


@pytest.fixture
def args(tmp_path, target_dir):
    answers = tmp_path / "own"
    answers.mkdir()
    for name in ("greedy", "sampled", "held_out_math", "held_out_math_sampled"):
        (answers / f"{name}.jsonl").write_text("{}\n")
    return SimpleNamespace(target=target_dir, answers=answers, steps=7, lr=None)


def test_every_variant_is_a_valid_training_file(study, args, tmp_path):
    for name, variant in study.VARIANTS.items():
        if variant.of is not None:
            assert study.VARIANTS[variant.of].of is None
            continue
        folder = study.run_folder(tmp_path / "work", name, 3)
        folder.mkdir(parents=True)
        schedule = read_schedule(study.training_file(variant, 3, folder, args))
        assert set(schedule.held_out) == {"math", "math_sampled"}
        (stage,) = schedule.stages
        assert (stage.seed, stage.steps, stage.lr) == (3, 7, 2e-3)
        assert schedule.draft == folder / "draft"
    assert schedule.objective.loss == "ce_kl"


@pytest.mark.parametrize("name", MADE)
def test_variants_are_made_and_their_objectives_fit_them(study, args, tmp_path, name):
    variant, folder = study.VARIANTS[name], tmp_path / "run"
    folder.mkdir()
    options = ["--target", str(args.target), "--out", str(folder / "draft")]
    assert main(["init", *options, *study.init_options(variant, args.target)]) == 0
    config = load_config(folder / "draft")
    if name == "dspark":
        assert config.candidates == config.vocab_size
    schedule = read_schedule(study.training_file(variant, 0, folder, args))
    schedule.objective.resolved(config)
    sources = {"dspark": (5, 6, 7), "dflash2": (1, 3, 5), "dflash": (1, 3, 5)}
    assert config.captured_layers == sources.get(name, ())
    assert (config.dependency is None) == (name in ("hyperdflash", "dflash"))


def test_parts_differ_from_the_papers_drafter_in_one_choice(study, args, tmp_path):
    def made(name: str) -> dict:
        variant, folder = study.VARIANTS[name], tmp_path / name
        folder.mkdir()
        options = ["--target", str(args.target), "--out", str(folder / "draft")]
        assert main(["init", *options, *study.init_options(variant, args.target)]) == 0
        config = load_config(folder / "draft")
        objective = read_schedule(study.training_file(variant, 0, folder, args)).objective
        fields = ("reducer", "source", "captured_layers", "block_size", "dependency")
        found = {field: getattr(config, field) for field in fields}
        return found | dataclasses.asdict(objective)

    base = made("hyperdflash")
    for name, expected in PARTS.items():
        found = made(name)
        assert {field for field in base if base[field] != found[field]} == expected, name


def test_a_drafter_is_served_with_another_k(study, tmp_path):
    work = tmp_path / "work"
    source = study.run_folder(work, "hyperdflash2", 1)
    (source / "drafter").mkdir(parents=True)
    assert study.drafter_of("K = 16", 1, work) is None
    (source / "trained.json").write_text("{}")
    raw = {"hyperdflash_config": {"dependency": {"rank": 4, "top_k": 256}}}
    (source / "drafter" / "config.json").write_text(json.dumps(raw))
    (source / "drafter" / "model.safetensors").write_text("weights")
    found = study.drafter_of("K = 16", 1, work)
    changed = json.loads((found / "config.json").read_text())
    assert changed["hyperdflash_config"]["dependency"] == {"rank": 4, "top_k": 16}
    assert (found / "model.safetensors").read_text() == "weights"
    shutil.copytree(source, study.run_folder(work, "hyperdflash", 1))
    found = study.drafter_of("argmax drafts", 1, work)
    assert json.loads((found / "config.json").read_text()) == raw


def test_the_answers_of_a_prompt_are_added_up(study):
    """Two prompts, asked twice: p, q, p, q."""

    def answer(*histogram: int) -> dict:
        return {"meta_info": {"spec_correct_drafts_histogram": list(histogram)}}

    answers = [answer(1, 2), answer(0, 0, 3), answer(4), answer(0, 1, 1)]
    assert study.tau_of(answers, 2) == {
        "tau": 1 + 11 / 12,
        "histogram": [5, 3, 4],
        "prompts": [[7, 2], [5, 9]],
    }
    assert [rounds for rounds, _ in study.tau_of(answers)["prompts"]] == [3, 3, 4, 2]


def test_the_report_pairs_seeds_with_the_papers_drafter(study, tmp_path):
    import drafter_report

    def run(*taus: float) -> dict:
        # The first kind takes three times the rounds of the second, which accepts one more.
        def kind(tau: float, rounds: int) -> dict:
            prompts = [[rounds, round(rounds * (tau - 1 + by))] for by in (0.1, -0.1)]
            return {"tau": tau, "prompts": prompts}

        served = {
            t: {"a": kind(tau - 0.5, 300), "b": kind(tau + 0.5, 100)}
            for t, tau in zip(("0", "1"), taus, strict=True)
        }
        return {"served": served, "trained": {"step": 400}, "identical": 4, "answers": 4}

    asked = {"setting": {"repeats": 3}}
    runs = {
        "hyperdflash2": {s: run(tau, 3.0) | asked for s, tau in enumerate((4.4, 5.0))},
        "hyperdflash": {0: run(4.0, 2.0), 1: run(4.0, 2.0)},
    }
    nats = {"0": {"a": 0.0}, "1": {"a": 1.5}}
    drafter_report.write_report(runs, nats, tmp_path)
    text = (tmp_path / "report.md").read_text()
    row = "| 2 | 4.70 | 3.00 | 0.64 | 1.18x (1.17 to 1.18; 1.10, 1.25) | "
    row += "1.50x (1.48 to 1.53; 1.50, 1.50) |"
    assert f"| hyperdflash2 {row}" in text
    # Over all rounds both lose a quarter; seeds weigh alike, prompts are drawn together.
    row = "| 2 | 4.45 | 2.75 | 0.62 | 1.19x (1.18 to 1.19; 1.11, 1.27) | "
    row += "1.57x (1.54 to 1.61; 1.57, 1.57) |"
    assert f"| hyperdflash2 {row}" in text[text.index("rivals, over all rounds") :]
    assert "random gate" not in text and "Depth" not in text
    assert (
        "16 of 16 greedy" in text
        and "4 servers of drafters, 400 steps" in text
        and "T 1: a 1.50" in text
    )
    assert json.loads((tmp_path / "results.json").read_text())["provenance"]["argv"]
    assert "Sampled prompts were asked once or 3 times." in text
    assert (tmp_path / "tau.svg").read_text().lstrip().startswith("<?xml")


def test_results_of_two_settings_are_not_mixed(study, tmp_path):
    import drafter_report

    path, setting = tmp_path / "served.json", {"repeats": 1, "prompts": "a"}
    assert not study.was_served(path, setting)
    path.write_text(json.dumps({"setting": setting}))
    assert study.was_served(path, setting)
    with pytest.raises(SystemExit, match="served with another prompts"):
        study.was_served(path, setting | {"prompts": "b"})
    path.write_text("{}")
    with pytest.raises(SystemExit, match="another repeats, prompts"):
        study.was_served(path, setting)
    with pytest.raises(SystemExit, match=r"asked \[1, 3\] times"):
        drafter_report.repeats_of({0: {"setting": {"repeats": 3}}, 1: {}})


def test_the_report_asks_for_variants_that_are_made(study, tmp_path):
    import drafter_report

    listed = {name for _, names in drafter_report.AXES.values() for name in names}
    assert listed == {name for name, variant in study.VARIANTS.items()}
    with pytest.raises(SystemExit, match="run train and serve first"):
        drafter_report.write_report({name: {} for name in study.VARIANTS}, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
