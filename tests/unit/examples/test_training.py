"""The scripts that made the tiny target and its drafters, each on a few prompts or stubs."""

import json

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.config import load_config, parse_config
from sglang_hyperdflash.training.conversations import parse_conversation
from sglang_hyperdflash.training.recipe import read_schedule
from tests.conftest import EXAMPLE

pytestmark = pytest.mark.heavy


def test_prompts_of_all_kinds_are_the_same_every_time(script, monkeypatch, tmp_path):
    corpus = script("corpus")
    monkeypatch.setattr(corpus, "PER_FAMILY", {"train": 4, "held_out": 2})
    monkeypatch.setattr(corpus, "SCRAMBLED_PROMPTS", {"train": 20, "held_out": 12})
    for name in ("first", "again"):
        corpus.write(tmp_path / name, per_kind=2, held_out=1)
    files = {path.stem: path.read_text() for path in (tmp_path / "first").iterdir()}
    assert files == {path.stem: path.read_text() for path in (tmp_path / "again").iterdir()}
    kinds = {f"held_out_{kind}" for kind in corpus.WEIGHTS}
    assert set(files) == {"greedy", "sampled", *kinds}
    lines = {name: list(map(json.loads, text.splitlines())) for name, text in files.items()}
    assert [len(lines[name]) for name in ("greedy", "sampled")] == [5, 5]
    for each in lines.values():
        for line in each:
            assert parse_conversation(line, "here").messages[0]["role"] == "user"
            said = [m["content"] for m in line["messages"] if m["role"] == "user"]
            assert 0 < sum(map(len, said)) <= corpus.LONGEST
    # Conversations come family by family in turn; those that are chosen are of all of them.
    turns = [[{"role": "user", "content": str(i)}] for i in range(240)]
    assert len({int(m["content"]) % 12 for (m,) in corpus.chosen(turns, 60)}) == 12


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
