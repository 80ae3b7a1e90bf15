"""Training files: what they may hold, what they become, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import train
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.recipe import read_schedule
from sglang_hyperdflash.training.replay import check_whole_blocks
from sglang_hyperdflash.training.rows import LeftOut
from sglang_hyperdflash.training.samples import Sample, collate
from tests.conftest import EXAMPLE
from tests.unit.shards import split

DRAFTER = EXAMPLE / "hyperdflash"

WHOLE = """
target = "target"
draft = "draft"
out = "out"
max_length = 99
features = "online"
[held_out]
math = "math.jsonl"
[objective]
alpha = 0.2
P = 3
[[stage]]
data = ["a.jsonl", "hub:owner/name"]
epochs = 1.5
batch = 4
lr = 8e-4
[[stage]]
data = ["b.jsonl"]
minutes = 3
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path):
    schedule = read_schedule(written(tmp_path, WHOLE))
    assert schedule.target == "target"  # no such folder here: a hub id
    assert schedule.held_out == {"math": str(tmp_path / "math.jsonl")}
    assert schedule.objective == Objective(alpha=0.2, P=3)
    first, second = schedule.stage
    assert first.data == (str(tmp_path / "a.jsonl"), "hub:owner/name")
    recipe = first.resolve(samples=10, objective=schedule.objective)
    assert (recipe.steps, recipe.minutes, recipe.lr) == (4, None, 8e-4)  # ceil(1.5 * 10 / 4)
    assert recipe.objective is schedule.objective
    assert second.resolve(10, schedule.objective).minutes == 3


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('draft = "draft"', "", "draft is missing"),
        ('target = "target"', "target = ", "is not TOML"),
        ("max_length = 99", "max_len = 99", "unknown field max_len; known are"),
        ("P = 3", "tau = 1", r"objective: unknown field tau"),
        ("P = 3", 'loss = "none"', r"objective.loss must be 'ce_kl', 'acceptance' or 'sel"),
        ("alpha = 0.2", "alpha = -1", "alpha must be greater than or equal to 0, found -1"),
        ("P = 3", "P = 1.5", r"objective.P must be a valid integer, found 1.5"),
        ("lr = 8e-4", 'lr = "high"', 'stage 1.lr must be a valid number, found "high"'),
        ("lr = 8e-4", "lr = 0", "stage 1.lr must be greater than 0, found 0"),
        ("lr = 8e-4", "lr = nan", "stage 1.lr must be a finite number"),
        ("lr = 8e-4", "lr = inf", "stage 1.lr must be a finite number"),
        ("batch = 4", "batch = 2.5", "stage 1.batch must be a valid integer, found 2.5"),
        ("batch = 4", "batch = true", "stage 1.batch must be a valid integer, found true"),
        ("batch = 4", "bf16 = 1", "stage 1.bf16 must be a valid boolean, found 1"),
        (
            "batch = 4",
            "every = 0",
            "stage 1.every must be greater than or equal to 1, found 0",
        ),
        ("epochs = 1.5", "steps = 2.5", "stage 1.steps must be a valid integer, found 2.5"),
        ('["b.jsonl"]', '"b.jsonl"', 'stage 2.data must be a valid array, found "b.jsonl"'),
        ('["b.jsonl"]', "[]", "stage 2.data must have at least 1 item"),
        ('["b.jsonl"]', "[3]", "stage 2.data 1 must be a valid string, found 3"),
        ("max_length = 99", "max_length = 0", "max_length must be greater than .* found 0"),
        ("max_length = 99", 'max_length = "9"', 'max_length must be a valid integer, found "9"'),
        ('math = "math.jsonl"', "math = 3", r"held_out.* must be a valid string"),
        ('draft = "draft"', "draft = 3", "draft must be a valid string, found 3"),
        ("epochs = 1.5", "", "stage 1 needs exactly one of epochs, steps or minutes; found none"),
        ("minutes = 3", "minutes = 3\nsteps = 4", "stage 2 needs exactly one of"),
        ("lr = 8e-4", "learning_rate = 1", "stage 1: unknown field learning_rate"),
        ('data = ["b.jsonl"]', "", "stage 2.data is missing"),
        ('"online"', '"magic"', "features must be 'cache', 'online' or 'captured'"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, old, new, message):
    assert old in WHOLE
    with pytest.raises(HyperDFlashConfigError, match=message):
        read_schedule(written(tmp_path, WHOLE.replace(old, new)))


def small(tmp_path: Path, target_dir: Path, out="out", steps=2, **changes) -> Path:
    """A training file that runs in seconds, with its drafter and data next to it."""
    if not (tmp_path / "draft").exists():
        sizes = ["--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "32"]
        sizes += ["--intermediate-size", "64", "--dependency-rank", "0"]
        command = ["init", "--target", str(target_dir), "--out", str(tmp_path / "draft")]
        assert main([*command, *sizes]) == 0
        line = {"instruction": "Count", "output": ", ".join(map(str, range(30)))}
        (tmp_path / "a.jsonl").write_text((json.dumps(line) + "\n") * 2)
    stage = {"lr": 1e-3, "warmup_steps": 5} | changes
    fields = "".join(f"{name} = {value}\n" for name, value in stage.items())
    return written(
        tmp_path,
        f"""
target = "{target_dir}"
draft = "draft"
out = "{out}"
max_length = 300
[held_out]
count = "a.jsonl"
[[stage]]
data = ["a.jsonl"]
steps = {steps}
batch = 2
every = 1
bf16 = false
{fields}""",
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_others_hold_is_never_overwritten(tmp_path, target_dir, capsys):
    """Found as: the target's own weights were replaced by a drafter's, exit 0."""
    target = tmp_path / "target"
    shutil.copytree(target_dir, target)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_text("years of work")
    before = contents(target) | contents(mine)
    cases = [
        ("target", "work", "out .*target is the target .*, which would be overwritten"),
        ("target/new", "work", "lies inside the target"),
        ("draft", "work", "out .*draft is the draft"),
        ("draft/new", "work", "lies inside the draft"),
        (".", "work", "holds the target"),
        ("mine", "work", "expected a new or empty folder, .* found model.safetensors"),
        ("out", "mine", "expected a new or empty folder, .* found model.safetensors"),
        ("out", "target/work", "--work .* lies inside the target"),
        ("work", "work", "must not be or contain --work"),
    ]
    for out, work, message in cases:
        config = small(tmp_path, target, out)
        assert main(["train", "--config", str(config), "--work", str(tmp_path / work)]) == 2
        found = capsys.readouterr().err
        assert re.search(message, found), (message, found)
        assert contents(target) | contents(mine) == before
        assert not (tmp_path / "work").exists()
        assert not (tmp_path / "out").exists()


def test_a_run_resumes_its_own_work_and_no_other(tmp_path, target_dir, capsys):
    work, out = tmp_path / "work", tmp_path / "out"

    def run(**changes) -> str:
        options = ["--config", str(small(tmp_path, target_dir, **changes)), "--work", str(work)]
        code = main(["train", *options])
        found = capsys.readouterr()
        assert (code == 0) == (not found.err.startswith("hyperdflash"))
        return found.out + found.err

    assert re.search(r"best: step \d, tau \d\.\d\d \(.*/out\)", run(steps=2))
    assert "stage 1: resumed at step 2" in run(steps=3)
    finished = contents(out)
    assert "other settings: stage 1.lr was 0.001, now 0.5" in run(steps=3, lr=0.5)
    assert "expected a new or empty folder" not in run(steps=3)
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("29", "92"))
    assert "other settings" in run(steps=3)
    assert contents(out) == finished
    log = (work / "stage-1" / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3]


def test_what_a_loss_that_is_not_finite_advises_can_be_done(tmp_path, target_dir, capsys):
    """Found as: it said to lower lr and resume, which is refused."""

    def run(out: str, lr: float) -> tuple[int, str]:
        config = small(tmp_path, target_dir, out, lr=lr, warmup_steps=0)
        command = ["train", "--config", str(config), "--work", str(tmp_path / f"{out}-work")]
        return main(command), capsys.readouterr().err

    said = run("out", 1e20)[1]
    assert "Lower the stage's lr, now 1e+20, and retrain with a new --work and" in said
    assert [run("out", 1e-3)[0], run("new", 1e-3)[0]] == [2, 0]


def test_a_draft_of_equal_weights_and_another_window_is_another_run(tmp_path, target_dir, capsys):
    """Found as: the run resumed, and published the first draft's config."""
    command = ["train", "--config", str(small(tmp_path, target_dir)), "--work"]
    command.append(str(tmp_path / "work"))
    assert main(command) == 0
    published = contents(tmp_path / "out")
    path = tmp_path / "draft" / "config.json"
    before = path.read_text()
    assert '"window": null' in before
    path.write_text(before.replace('"window": null', '"window": 16'))
    capsys.readouterr()
    assert main(command) == 2
    assert "other settings: draft_config was" in capsys.readouterr().err
    assert contents(tmp_path / "out") == published


def test_another_run_into_one_out_or_one_work_is_refused(tmp_path, target_dir, capsys, monkeypatch):
    config = small(tmp_path, target_dir)
    whole = train.train
    codes = []

    def with_a_second(*args):
        for work in ("work", "other"):
            command = ["train", "--config", str(config), "--work", str(tmp_path / work)]
            codes.append(main(command))
        whole(*args)

    monkeypatch.setattr(train, "train", with_a_second)
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 0
    assert codes == [2, 2]
    first, second = capsys.readouterr().err.split("hyperdflash train: ")[1:3]
    assert "work is in use by process" in first and f"process {os.getpid()}" in first
    assert "out is in use by process" in second
    shutil.rmtree(tmp_path / "other")
    command = ["train", "--config", str(config), "--work", str(tmp_path / "other")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "holds a run of `hyperdflash train (out)` with other settings: run was" in said
    assert f"remove {tmp_path / 'out'} to start over" in said


@pytest.mark.parametrize("file", ["state-2.pt", "best/model.safetensors"])
def test_a_flipped_byte_is_found_or_mended(tmp_path, target_dir, capsys, file):
    work = tmp_path / "work"
    command = ["train", "--config", str(small(tmp_path, target_dir)), "--work", str(work)]
    assert main(command) == 0
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    damaged = work / "stage-1" / file
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    capsys.readouterr()
    if file == "state-2.pt":
        assert main(command) == 2
        message = capsys.readouterr().err
        assert f"{damaged} is damaged: the CRC-32 of " in message
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
        damaged.unlink()
    assert main(command) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    if file != "state-2.pt":
        assert damaged.read_bytes() == expected


def test_a_stage_is_not_made_longer_after_the_next_one_began(tmp_path, target_dir, capsys):
    """Found as: stage 2 went on from what stage 1 had been, and nothing said so."""
    work = tmp_path / "work"

    def run(steps: int) -> tuple[int, str]:
        config = small(tmp_path, target_dir, steps=steps)
        text = config.read_text()
        config.write_text(
            text + text[text.index("[[stage]]") :].replace(f"steps = {steps}", "steps = 1")
        )
        code = main(["train", "--config", str(config), "--work", str(work)])
        return code, capsys.readouterr().err

    assert run(1)[0] == 0
    code, said = run(2)
    assert code == 2
    assert "stage 1 would continue from step 1, but stage 2 started" in said
    assert f"remove {work / 'stage-2'} and run the same command" in said
    assert run(1)[0] == 0
    shutil.rmtree(work / "stage-2")
    assert run(2)[0] == 0


def test_a_stage_starts_from_the_fp32_weights_of_the_one_before(tmp_path, target_dir):
    """Found as: it started from the published weights, which are rounded to bf16."""
    config = small(tmp_path, target_dir, lr=1e-2, lr_floor=0.0, warmup_steps=0)
    text = config.read_text()
    following = text[text.index("[[stage]]") :].replace("lr = 0.01", "lr = 1e-30")
    config.write_text(text + following)
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 0
    first, second = (
        torch.load(tmp_path / "work" / f"stage-{n}" / "state-2.pt", weights_only=True)
        for n in (1, 2)
    )
    rounded = 0
    for name, weight in first["best"]["weights"].items():
        assert torch.equal(weight, second["drafter"][name]), name
        rounded += int((weight.bfloat16().float() != weight).sum())
    assert rounded > 1000
    published = load_file(tmp_path / "out" / "model.safetensors")
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(published[name], second["best"]["weights"][name].bfloat16())


def test_a_draft_in_shards_is_trained_as_one_file_is(tmp_path, target_dir, capsys):
    """Found as: it was served, and ``model.safetensors does not exist`` here."""
    config = small(tmp_path, target_dir)
    command = ["train", "--config", str(config), "--work", str(tmp_path / "work")]
    assert main(command) == 0
    (whole,) = (tmp_path / "out").glob("*.safetensors")
    expected = whole.read_bytes()
    for name in ("out", "work"):
        shutil.rmtree(tmp_path / name)
    shards = split(tmp_path / "draft")
    assert main(command) == 0 and whole.read_bytes() == expected
    tensors = load_file(shards[1])
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, shards[1])
    assert main(command) == 2
    assert "other settings: draft was" in capsys.readouterr().err
    publish(tmp_path / "published", tmp_path / "draft")
    published = Drafter.load(current(tmp_path / "published").path)
    name = next(iter(tensors))
    assert torch.equal(published.state_dict()[name], tensors[name].float() + 1)
    shards[0].unlink()
    for name in ("out", "work"):
        shutil.rmtree(tmp_path / name)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "tensors are missing" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", b"\xff\xfe", "config.json is not JSON: "),
        ("config.json", b"[]", r"config.json: expected a JSON object, found \[\]"),
        ("model.safetensors", b"x" * 40, "model.safetensors is damaged: "),
    ],
)
def test_a_damaged_draft_is_one_line(tmp_path, target_dir, capsys, name, content, message):
    """Found as: a traceback."""
    config = small(tmp_path, target_dir)
    (tmp_path / "draft" / name).write_bytes(content)
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_held_out_answers_shorter_than_a_block_are_refused_before_training(
    tmp_path, target_dir, capsys
):
    """Found as: tau 1.00 at every checkpoint, and the first one kept as the best."""
    config, short = small(tmp_path, target_dir), tmp_path / "short.jsonl"
    short.write_text(json.dumps({"instruction": "Count", "output": "1"}) + "\n")
    config.write_text(config.read_text().replace('count = "a', 'count = "short'))
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 2
    error = capsys.readouterr().err
    assert f"[held_out] {short}: expected an answer of at least 7 tokens" in error
    assert "remove it from [held_out]" in error and error.count("\n") == 1
    assert not (tmp_path / "work" / "stage-1").exists()


@pytest.mark.parametrize("length, whole", [(6, False), (7, True)])
def test_a_held_out_answer_is_refused_exactly_where_the_replay_counts_no_round(length, whole):
    samples = [Sample(list(range(20)), ((3, 3 + length), (18, 20)))]
    rows = collate(samples)
    blocks = Blocks.draw(rows, 20, 7, [0])
    assert bool((blocks.keep & blocks.supervised.all(-1)).any()) == whole
    with nullcontext() if whole else pytest.raises(HyperDFlashConfigError, match="found 6"):
        check_whole_blocks(samples, 7, "a.jsonl")


def test_a_gpu_that_is_not_there_is_one_line(tmp_path, target_dir, capsys, monkeypatch):
    """Found as: a traceback of torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = str(small(tmp_path, target_dir))
    capsys.readouterr()
    command = ["train", "--config", config, "--work", str(tmp_path / "work")]
    assert main([*command, "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "--device cuda: expected a GPU that torch sees, found none" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("seed", [20260131, 2**62])
def test_any_seed_trains(tmp_path, target_dir, seed):
    """Found as: a date as the seed overflowed torch's."""
    config = small(tmp_path, target_dir, steps=1, seed=seed)
    assert main(["train", "--config", str(config), "--work", str(tmp_path / "work")]) == 0


def test_a_target_without_tokenizer_files_is_one_line(tmp_path, target_dir, capsys):
    """Found as: a traceback of transformers in every command that reads conversations."""
    target = tmp_path / "target"
    target.mkdir()
    for path in target_dir.iterdir():
        if "token" not in path.name:
            shutil.copyfile(path, target / path.name)
    config = small(tmp_path, target_dir)
    config.write_text(config.read_text().replace(str(target_dir), str(target)))
    data, out = str(tmp_path / "a.jsonl"), str(tmp_path / "other.jsonl")
    (tmp_path / "turns.jsonl").write_text('{"turns": ["One?"]}\n')
    turns = ["--input", str(tmp_path / "turns.jsonl"), "--output", out]
    place = ["--target", str(target)]
    capsys.readouterr()
    for command in (
        ["train", "--config", str(config), "--work", str(tmp_path / "work")],
        ["capture", *place, "--data", data, "--out", str(tmp_path / "states")],
        ["regenerate", *place, *turns, "--server", "http://127.0.0.1:9"],
        ["generate", "--model", str(target), *turns],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"target {target} has no tokenizer that can be read (" in error
        assert "Add its tokenizer files" in error and error.count("\n") == 1
        Path(out).unlink(missing_ok=True)


def test_training_needs_no_tensorboard(tmp_path, target_dir, capsys, monkeypatch):
    monkeypatch.setattr("sglang_hyperdflash.training.monitor.find_spec", lambda _name: None)
    config, work = small(tmp_path, target_dir), tmp_path / "work"
    command = ["train", "--config", str(config), "--work", str(work)]
    assert main(command) == 2
    assert "tensorboard is not installed. Run `pip install" in capsys.readouterr().err
    assert not work.exists()
    config.write_text('report_to = ["none"]\n' + config.read_text())
    assert main(command) == 0


def test_files_that_are_not_there(tmp_path, capsys):
    work = ["--work", str(tmp_path / "work")]
    assert main(["train", "--config", str(tmp_path / "none.toml"), *work]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["train", "--config", str(written(tmp_path, WHOLE)), *work]) == 2
    assert "no config.json in the draft checkpoint folder" in capsys.readouterr().err


def test_a_drafter_of_another_target_is_refused(tmp_path, target_dir, drafter_dir, capsys):
    config = (drafter_dir / "config.json").read_text()
    fingerprint = config.split('"hc_head_fingerprint": "')[1].split('"')[0]
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").symlink_to(drafter_dir / "model.safetensors")
    (draft / "config.json").write_text(config.replace(fingerprint, "0" * 16))
    (tmp_path / "a.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    config = small(tmp_path, target_dir)
    work = ["--work", str(tmp_path / "work")]
    assert main(["train", "--config", str(config), *work]) == 2
    assert "was made for another target" in capsys.readouterr().err


def test_a_file_of_two_stages_is_read_and_listed_once(tmp_path, target_dir):
    """Found as: its rows were counted twice, and another file blamed for an empty one."""
    good, bad = {"instruction": "Hi", "output": "Yo"}, {"conversations": []}
    a, b, empty = (tmp_path / name for name in ("a", "b", "empty"))
    for path, rows in (a, [good, bad]), (b, [bad, good]), (empty, [{"text": ""}]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = [SimpleNamespace(data=(a, b)), SimpleNamespace(data=(a,))]
    schedule = SimpleNamespace(
        target=str(target_dir), held_out={"a": a}, max_length=99, stage=stages
    )
    loaded = train.load_all(schedule, left_out := LeftOut())
    assert left_out.read == 4 and list(left_out.entries) == [f"{a}:2", f"{b}:1"]
    assert loaded[a, b].places == [f"{a}:1", f"{b}:2"] and loaded[a, b].rows == [0, 1]
    stages.append(SimpleNamespace(data=(empty,)))
    with pytest.raises(HyperDFlashConfigError, match=f"no usable row of 1 in {empty}; {empty}:1"):
        train.load_all(schedule, LeftOut())
