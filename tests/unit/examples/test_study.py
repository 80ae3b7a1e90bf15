"""The study of drafters: what it trains, what it keeps, and the ratios that it reports."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import load_config, parse_config
from sglang_hyperdflash.tools.checksum import file_hash
from sglang_hyperdflash.training.recipe import read_schedule
from tests.conftest import EXAMPLE, ROOT

# Draft folders that were trained as the study trains: variant -> the committed one.
COMMITTED = {
    "hyperdflash": "hyperdflash",
    "hyperdflash2": "drafter",
    "dspark-style": "dspark_style",
    "dflash2-style": "dflash2_style",
    "dflash": "dflash",
}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import study

    return study


@pytest.fixture
def answers(tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    for name in ("greedy", "sampled", "held_out_math", "held_out_math_sampled"):
        (folder / f"{name}.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize("name", COMMITTED)
def test_a_variant_is_the_committed_drafter_and_a_training_file_that_fits_it(
    study, answers, tmp_path, name
):
    variant, folder = study.VARIANTS[name], tmp_path / "run"
    folder.mkdir()
    made = ["--target", str(study.TARGET), "--out", str(folder / "new"), *study.SHAPE]
    assert main(["init", *made, *variant.init]) == 0
    found = load_config(folder / "new")
    raw = json.loads((EXAMPLE / COMMITTED[name] / "config.json").read_text())
    assert found == parse_config(raw | {"architectures": ["HyperDFlashDraftModel"]})
    schedule = read_schedule(study.training_file(variant, folder, answers, seed=3, steps=7))
    schedule.objective.resolved(found)
    loss = {"dspark-style": "acceptance", "dflash2-style": "selector"}.get(name, "ce_kl")
    assert schedule.objective.loss == loss
    (stage,) = schedule.stage
    assert (stage.seed, stage.steps, stage.lr, stage.batch) == (3, 7, 2e-3, 16)
    assert set(schedule.held_out) == {"math", "math_sampled"}
    assert schedule.draft == folder / "new" and schedule.out == folder / "trained"


def test_a_training_by_the_clock_has_no_number_of_steps(study, answers, tmp_path):
    variant = study.VARIANTS["hyperdflash2"]
    path = study.training_file(variant, tmp_path, answers, steps=None, minutes=2.5)
    (stage,) = read_schedule(path).stage
    assert (stage.steps, stage.minutes) == (None, 2.5)


def test_a_drafter_is_trained_once_and_never_taken_for_one_of_other_steps(
    study, answers, monkeypatch
):
    trained = []

    def train(variant, folder, answers, seed, threads, steps):
        trained.append((variant, seed, steps))
        folder.mkdir(parents=True)

    monkeypatch.setattr(study, "train_drafter", train)
    args = argparse.Namespace(work=answers.parent, steps=5, threads=1)
    first = study.drafter_of("hyperdflash", 1, args)
    assert study.drafter_of("hyperdflash, argmax drafts", 1, args) == first
    assert trained == [(study.VARIANTS["hyperdflash"], 1, 5)]
    args.steps = 6
    with pytest.raises(SystemExit, match=r"'steps': 6.*'steps': 5"):
        study.drafter_of("hyperdflash", 1, args)


def test_the_counts_of_a_prompt_are_added_up(study):
    """Two prompts, asked twice: p, q, p, q."""
    answers = [
        {"meta_info": {"spec_correct_drafts_histogram": histogram}}
        for histogram in ([1, 2], [0, 0, 3], [4], [0, 1, 1])
    ]
    assert study.counts_of(answers, 2) == [[7, 2], [5, 9]]
    assert study.counts_of(answers, 4) == [[3, 2], [3, 6], [4, 0], [2, 3]]


def test_only_what_is_missing_is_measured_and_only_with_the_same_weights(
    study, monkeypatch, tmp_path
):
    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setattr(study, "drafter_of", lambda *_: tmp_path)
    args = argparse.Namespace(variants=["hyperdflash", "dflash"])
    found = study.stored(tmp_path / "results.json", {"prompts": "a"})
    assert [name for name, _ in study.pending(found, 0, args)] == ["hyperdflash", "dflash"]
    found["seeds"]["0"] = {"hyperdflash": {}}
    assert list(study.pending(found, 0, args)) == [("dflash", tmp_path)]
    assert found["weights"]["0"]["dflash"] == file_hash(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_text("others")
    with pytest.raises(SystemExit, match="other weights"):
        list(study.pending(found, 0, args))
    (tmp_path / "results.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="other prompts"):
        study.stored(tmp_path / "results.json", {"prompts": "b"})


def test_each_server_is_asked_first_as_often_as_every_other(study, monkeypatch):
    asked = []
    monkeypatch.setattr(study, "timed", lambda server, *_: asked.append(server) or [1, 2.0, 1.0])
    servers = {name: name for name in "abc"}
    prompts = {"x": [[1]] * 4, "y": [[1]] * 2}
    found = study.interleaved(servers, prompts, {"0": {}, "1": {}})
    assert {len(found[n][t][k]) for n in "abc" for t in "01" for k in "x"} == {4}
    warm_up, half = len(servers) * len(prompts), len(asked) // 2
    for part in (asked[:half], asked[half:]):
        first = part[warm_up :: len(servers)]
        assert sorted(first) == list("aabbcc")


class FakeServer:
    """Answers at once; a drafter's rounds accept three drafts, its answers are the baseline's."""

    def __init__(self, name: str, started: list[str]) -> None:
        self.name = name
        started.append(name)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def wait(self):
        return self

    def generate(self, input_ids, sampling_params, return_logprob) -> dict:
        tokens = input_ids[-4:]
        meta = {"output_token_logprobs": [[-0.5, token, None] for token in tokens]}
        if self.name != "baseline":
            meta["spec_correct_drafts_histogram"] = [0, 0, 0, 1]
        return {"output_ids": tokens, "meta_info": meta}


@pytest.mark.parametrize("command", ["serve", "speed"])
def test_a_study_writes_a_result_and_measures_nothing_twice(study, monkeypatch, tmp_path, command):
    started: list[str] = []
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "model.safetensors").write_text("weights")
    monkeypatch.setattr(study, "drafter_of", lambda *_: tmp_path / "drafter")
    monkeypatch.setattr(study, "server_of", lambda name, *_: FakeServer(name, started))
    monkeypatch.setattr(
        study, "timed", lambda server, *_: [4, 1.0 if "base" in server.name else 0.5, 0.5]
    )
    options = ["--out", str(tmp_path / "out"), "--seeds", "0", "1", "--num-prompts", "2"]
    names = ["hyperdflash", "hyperdflash2"]
    monkeypatch.setattr("sys.argv", ["study.py", command, *options, "--variants", *names])
    study.main()
    expected = {"serve": ["baseline"], "speed": []}[command]
    each = {"serve": names, "speed": ["baseline", "baseline again", *names]}[command]
    assert started == [*expected, *each, *each]
    report = (tmp_path / "out" / "report.md").read_text()
    if command == "serve":
        assert "24 of 24 greedy" in report and "| hyperdflash2 | 4.00 | 4.00 | 4.00 |" in report
        assert "| baseline, nats per token | 0.50 |" in report
    else:
        assert "| 1 | hyperdflash2 over baseline | 2.00x (2.00 to 2.00; 2.00, 2.00) |" in report
    found = (tmp_path / "out" / "results.json").read_text()
    monkeypatch.setattr("sys.argv", [*sys.argv, "--steps", "9"])
    study.main()
    assert started == [*expected, *each, *each]
    assert (tmp_path / "out" / "results.json").read_text() == found


def run(tau: float, rounds: int = 100) -> dict:
    """Two sets of two prompts; the first has three times the rounds, the second accepts one more.

    One prompt of each set accepts a tenth more than the mean, the other one a tenth less.
    """
    counts = {
        name: [[n * rounds, round(n * rounds * (tau - 1 + more + by))] for by in (0.1, -0.1)]
        for name, n, more in (("a", 3, -0.5), ("b", 1, 0.5))
    }
    of = {"identical": 4, "answers": 4, "repeats": 1, "steps": 400}
    return {"counts": {"0": counts}} | of


def test_a_ratio_is_the_mean_of_the_seeds_with_an_interval_over_prompts(study):
    seeds = {
        "0": {"hyperdflash": run(4.0), "hyperdflash2": run(4.4)},
        "1": {"hyperdflash": run(4.0), "hyperdflash2": run(5.0)},
    }
    text = study.render({"seeds": seeds, "nats": {"0": {"a": 0.0, "b": 1.5}}})
    # Over all rounds the sets' difference leaves a quarter less.
    row = text[text.index("## Over hyperdflash\n") :].splitlines()[5]
    assert row.startswith("| hyperdflash2 | 4.45 | 1.19x (")
    assert row.endswith(f"; {4.15 / 3.75:.2f}, {4.75 / 3.75:.2f}) |")
    low, high = map(float, row.split("(")[1].split(";")[0].split(" to "))
    assert 1.17 < low < 4.45 / 3.75 < high < 1.20
    assert "| hyperdflash2 | 4.20 | 5.20 |" in text and "16 of 16 greedy" in text
    assert "| baseline, nats per token | 0.00 | 1.50 |" in text


def test_the_ratio_of_speeds_is_of_tokens_and_seconds(study):
    def server(speed: float) -> dict:
        sets = {"short": (4, 6), "long": (40, 60)}
        return {
            "0": {
                name: [[tokens, tokens / speed, (tokens - 1) / speed / 2] for tokens in lengths]
                for name, lengths in sets.items()
            }
        }

    names = ("baseline", "baseline again", "hyperdflash", "hyperdflash2")
    seeds = {
        seed: {name: server(speed) for name, speed in zip(names, (1, 1, 2, fast), strict=True)}
        for seed, fast in (("0", 3), ("1", 4))
    }
    cell = "1.75x (1.75 to 1.75; 1.50, 2.00)"
    assert f"| 0 | hyperdflash2 over hyperdflash | {cell} | {cell} |" in study.render(
        {"seeds": seeds}
    )
    # One long answer takes twice as long: one prompt decides.
    seeds["0"]["hyperdflash2"]["0"]["long"][1][1] *= 2
    text = study.render({"seeds": {"0": seeds["0"]}})
    row = next(line for line in text.splitlines() if "hyperdflash2 over hyperdflash" in line)
    found, interval = row.split("|")[3].split("x (")
    assert float(found) == pytest.approx(1.5 * 110 / 170, abs=0.005)
    low, high = map(float, interval.split(")")[0].split(" to "))
    assert high - low > 0.1
    assert "| 0 | baseline again over baseline | 1.00x (1.00 to 1.00) |" in text


@pytest.mark.parametrize("name", ["three_seeds", "paired_speed"])
def test_committed_reports_are_rendered_from_their_results(study, name):
    folder = ROOT / "eval" / "results" / name
    found = json.loads((folder / "results.json").read_text())
    assert study.render(found) == (folder / "report.md").read_text()
    assert set(found["seeds"]) == {"0", "1", "2"}
    variants = {name for runs in found["seeds"].values() for name in runs}
    assert variants <= {*study.VARIANTS, study.BASELINE, study.NOISE}
