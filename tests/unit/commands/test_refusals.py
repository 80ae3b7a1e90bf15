"""What each command refuses: one line that names it, exit code 2, and nothing is written."""

import json
import os
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture, generate, init, learn, regenerate, train
from sglang_hyperdflash.commands.answers import Answers
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import claim
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import read_schedule
from sglang_hyperdflash.training.store.manifest import Data
from tests.unit.commands.builders import RECIPE, SAMPLE, small, write_rows
from tests.unit.serving.v4_shapes import FLASH

# In the working folder; what a case adds comes after these.
COMMANDS = {
    "init": "--target target --out new",
    "regenerate": "--server http://127.0.0.1:9 --target target --input chats --output out.jsonl",
    "generate": "--model target --input chats --output out.jsonl",
    "capture": "--target target --data a.jsonl --out new",
    "train": "--config train.toml --work work",
    "learn": "--target target --draft draft --store store --publish published --work work",
    "plan": "--draft draft",
}
INDEX, KV = "v4/model.safetensors.index.json", "plan --target v4 --gpu-gib 80"
FULL_KV = f"{KV} --weights-gib 1"
# Wrong options of each command; the line names what is between the stars.
OPTIONS = f"""\
init: --heads 5 *--kv-heads* 2 | *--head-dim* 33 | *--layers* 0 | --*window* 6 | --out *mine*
init: *--dependency-rank* -1 | --dependency-rank 0 *--dependency-form* product
init: *--dependency-rank 0* --dependency-top-k 8 | --mask-token-id *5000* | --target *nowhere*
init: *--out target* | *--out target/draft*
regenerate: *--template-args* {{ | *--template-args* [] | *--concurrency* 1025 | *--limit* -1
regenerate: *--top-p* 0 | *--top-k* many | --input *none*
regenerate: *--output chats* | *--output target/out.jsonl*
generate: *--temperature* -1 | *--temperature* inf | *--top-k* 0 | *--min-p* 1.5
generate: *--draft hub:a* | --output *notes* | *--output chats* | *--output target/out.jsonl*
capture: --out *mine* | *--out target/states* | --data *none* | --dtype *int8*
capture: *--share* 3/2 | *--max-length* 0 | *--writer* node/1 | *--writer* .hidden
train: --config *none.toml* | --work *mine* | *--work target/work*
learn: *--publish draft*
{KV}: *--weights-gib* 90 | *--tp* 0 | *--gpu-gib* nan | *--mem-fraction-static* 85
plan --draft {SAMPLE}/drafter --training {RECIPE}: *--conversations* 1 2 3 | *--answer-tokens* 2000
{FULL_KV}: --target *target*"""
ONLINE = {"train.toml": ("[held", 'features = "online"\n[held')}
ENGINE = "--engine-args '{\"%s\": %s}'"
OTHER_LIST = {"out.left_out.jsonl": '{"index": 0, "where": "", "digest": "", "note": "mine"}\n'}
NO_TOKENIZER = {"target/tokenizer.json": None, "target/tokenizer_config.json": None}
# The command with more options; the files that are changed (None: removed; a pair: replaced text);
# the option, field or place that the line names.
CASES = [
    *(
        (f"{command} {option}".replace("*", ""), {}, option.split("*")[1])
        for command, options in (line.split(": ") for line in OPTIONS.split("\n"))
        for option in options.split(" | ")
    ),
    ("init --block-size 1", {}, "block_size"),
    ("init --dependency-rank 4 --dependency-top-k 5000", {}, "1363"),
    ("init", {"target/config.json": None}, "config.json"),
    ("init", {"target/config.json": "{"}, "config.json"),
    ("init", {"target/config.json": ('"hc_mult"', '"other"')}, "hc_mult"),
    ("init", {"target/config.json": ('"architectures"', '"other"')}, "architectures"),
    ("init", {"target/tokenizer_config.json": ('"mask_token"', '"other"')}, "--mask-token-id"),
    ("init", {"target/model.safetensors": b"x" * 40}, "model.safetensors"),
    ("regenerate", {}, "http://127.0.0.1:9"),
    ("generate --draft draft", {"draft/config.json": b"\xff"}, "config.json"),
    ("generate", OTHER_LIST, "out.left_out.jsonl"),
    ("generate", {"target/chat_template.jinja": None}, "chat_template.jinja"),
    ("train", {"draft/config.json": None}, "config.json"),
    ("train", {"draft/model.safetensors": b"x" * 40}, "model.safetensors"),
    ("train", {"draft/config.json": ('fingerprint": "', 'fingerprint": "0')}, "target"),
    ("train", {"train.toml": ('out = "out"', 'out = "target/new"')}, "target/new"),
    ("train", {"train.toml": ('out = "out"', 'out = "draft/new"')}, "draft/new"),
    ("train", {"train.toml": ('out = "out"', 'out = "."')}, "out "),
    ("train", {"train.toml": ('out = "out"', 'out = "mine"')}, "mine"),
    ("train", {"train.toml": ('out = "out"', 'out = "work"')}, "--work"),
    ("train", {"a.jsonl": '{"instruction": "Count", "output": "1"}\n', **ONLINE}, "[held_out]"),
    ("train --states kept", ONLINE, "--states"),
    ("learn --work store", {"store/a": "b"}, "--work store"),
    ("learn", {"draft/config.json": None}, "config.json"),
    ("plan", {}, "--target"),
    ("plan --target v4", {}, "--gpu-gib"),
    (KV, {}, "--weights-gib"),
    (KV, {INDEX: "{"}, "model.safetensors.index.json"),
    (KV, {INDEX: "[]"}, "model.safetensors.index.json"),
    (KV, {INDEX: '{"metadata": 3}'}, "--weights-gib"),
    (KV, {INDEX: '{"metadata": {"total_size": "9"}}'}, "--weights-gib"),
    (FULL_KV, {"v4/config.json": ('"head_dim"', '"other"')}, "head_dim"),
    (FULL_KV, {"v4/config.json": ('"compress_ratios"', '"other"')}, "compress_ratios"),
    *((name, NO_TOKENIZER, "tokenizer") for name in ("regenerate", "generate", "capture", "train")),
    # Another model or dtype among the engine's arguments would give another one's answers.
    *((f"generate {ENGINE % (name, 0)}", {}, f"{name}. ") for name in generate.RESERVED_ARGUMENTS),
    *((f"capture {ENGINE % (name, 0)}", {}, f"{name}. ") for name in capture.RESERVED_ARGUMENTS),
]
if not torch.cuda.is_available():
    CASES += [(f"{name} --device cuda", {}, "--device cuda") for name in ("train", "learn")]


def line_of(case: str) -> list[str]:
    name, *more = shlex.split(case)
    return [name, *COMMANDS[name].split(), *more]


def change(files: dict) -> None:
    for name, content in files.items():
        path = Path(name)
        if isinstance(content, tuple):
            assert content[0] in path.read_text()
            content = path.read_text().replace(*content, 1)
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # its content is shared with the other tests' folders
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(folder: Path) -> dict[str, tuple]:
    """Every file that has content, hidden ones aside."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    stats = {str(path): path.stat() for path in files}
    return {name: (s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats.items() if s.st_size}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, target_dir) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(target_dir, folder / "target")
    config = small(folder, folder / "target")
    config.write_text(config.read_text().replace(str(folder / "target"), "target"))
    write_rows(folder / "chats", {"turns": ["One?"]})
    (folder / "mine").mkdir()
    (folder / "mine" / "model.safetensors").write_text("years of work")
    (folder / "notes").write_text("mine")
    (folder / "v4").mkdir()
    (folder / "v4" / "config.json").write_text(json.dumps(FLASH))
    return folder


@pytest.fixture
def folder(tmp_path, prepared, monkeypatch) -> Path:
    """The working folder of a command, in which no real work can begin."""
    shutil.copytree(prepared, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    began = mock.Mock(side_effect=AssertionError("work began"))
    for module, name in (
        *((generate, "start_server"), (capture, "start_server")),
        *((train, "Trainer"), (learn, "wait_for_store"), (init.Drafter, "save")),
    ):
        monkeypatch.setattr(module, name, began)
    return tmp_path


@pytest.mark.parametrize("case, files, named", CASES, ids=[f"{c[0]}-{c[2]}"[:60] for c in CASES])
def test_a_refusal(folder, refused, case, files, named):
    change(files)
    before = contents(folder)
    assert named in refused(*line_of(case))
    assert contents(folder) == before


def test_a_server_that_is_not_there_is_one_short_line(folder, refused):
    assert "http://127.0.0.1:9 " in (said := refused(*line_of("regenerate")))
    assert "Connection" not in said and "Retries" not in said


def test_tensorboard_that_is_not_there(folder, refused, monkeypatch):
    monkeypatch.setattr("sglang_hyperdflash.training.monitor.find_spec", lambda _name: None)
    assert "tensorboard" in refused(*line_of("train"))
    assert not Path("work").exists()
    config = Path("train.toml").read_text()
    change({"train.toml": 'report_to = ["none"]\n' + config})
    monkeypatch.setattr(train, "train", mock.Mock())
    assert main(line_of("train")) == 0


@pytest.mark.parametrize(
    "case, place",
    [
        *(("init", "new"), ("regenerate", "out.jsonl"), ("generate", "out.jsonl")),
        *(("train", "work"), ("train", "out"), ("learn", "work"), ("learn", "published")),
    ],
)
def test_a_second_run_is_refused(folder, refused, case, place):
    with claim(folder / place, f"hyperdflash {case}", {}, is_file="jsonl" in place):
        said = refused(*line_of(case))
    assert place in said and f"in use by process {os.getpid()}" in said


def test_a_second_capture_of_one_share_is_refused(folder, refused, monkeypatch):
    def second(*_) -> int:
        assert f"in use by process {os.getpid()}" in refused(*line_of("capture"))
        return 1

    monkeypatch.setattr(capture, "_capture", second)
    assert main(line_of("capture")) == 0


SEED, MEMORY = ENGINE % ("random_seed", "4"), ENGINE % ("max_total_tokens", "64")
# The second run's options and files, and the setting that it names; None: it goes on.
SECOND = [
    ("generate --temperature 0.7", {}, "temperature"),
    ("generate --finished-only", {}, "finished_only"),
    ("generate --dtype half", {}, "dtype"),
    (f"generate {SEED}", {}, "engine_args.random_seed"),
    ("generate", {"chats": '{"turns": ["Two?"]}\n'}, "out.jsonl"),
    (f"generate {MEMORY}", {}, None),
    ("regenerate --temperature 0", {}, "temperature"),
    ("regenerate --template-args '{\"add\": 1}'", {}, "template.add"),
    ("regenerate", {"chats": '{"turns": ["Two?"]}\n'}, "out.jsonl"),
    ("regenerate --concurrency 3", {}, None),
    ("capture --shard-mib 1", {}, "shard_mib"),
    ("capture --dtype float32", {}, "dtype"),
    ("capture --states-dtype fp8", {}, "fp8"),
    (f"capture {SEED}", {}, "engine_args.random_seed"),
    ("train", {"train.toml": ("lr = 0.001", "lr = 0.5")}, "stage 1.lr"),
    ("train", {"train.toml": ("max_length = 300", "max_length = 299")}, "max_length"),
    ("train", {"a.jsonl": ("29", "92")}, "stage 1.data"),
    ("train", {"draft/config.json": ('"window": null', '"window": 16')}, "draft_config"),
    ("train --work other", {}, "out"),
    ("train", {"train.toml": ("steps = 2", "steps = 3")}, None),
    ("init --seed 1", {}, "seed"),
    ("init", {}, None),
]


@pytest.mark.parametrize("case, files, named", SECOND, ids=[f"{c[0]}-{c[2]}" for c in SECOND])
def test_a_second_run_with_other_settings(folder, refused, monkeypatch, case, files, named):
    """An earlier run's output is never continued with other settings, but with more memory."""

    async def one(self, *_) -> int:
        for asked in self.waiting():
            self.writer.append({"index": asked.index, "digest": asked.digest})
        return 1

    def save(_drafter, out) -> None:
        (out / "model.safetensors").write_text("weights")

    def captured(_args, _arguments, writer, _loaded) -> int:
        writer.begin(Data("digest", 1, 1))
        return 1

    def trained(schedule, work, *_, **__) -> None:
        for place in (work, schedule.out):
            (place / "state").write_text("state")

    served = [regenerate.TargetServer("http://fake", "model", 9)]
    running = nullcontext(SimpleNamespace(url="http://fake"))
    for module, name, stub in (
        *((regenerate, "check_servers", lambda *_: served), (Answers, "add_all", one)),
        *((generate, "start_server", lambda *_, **__: running), (init.Drafter, "save", save)),
        *((generate, "server_info", lambda _: {"max_req_input_len": 9}),),
        *((capture, "_capture", captured), (train, "train", trained)),
    ):
        monkeypatch.setattr(module, name, stub)
    # The template names the argument that a second run gives.
    change({"target/chat_template.jinja": ("{", "{{ add }}{")})
    assert main(line_of(case.split()[0])) == 0
    change(files)
    before = contents(folder)
    if named is None:
        assert main(line_of(case)) == 0
    else:
        assert named in refused(*line_of(case))
        assert contents(folder) == before


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


def test_a_whole_training_file(tmp_path):
    schedule = read_schedule(write_rows(tmp_path / "train.toml", WHOLE))
    assert schedule.target == "target"  # no such folder here: a hub id
    assert schedule.held_out == {"math": str(tmp_path / "math.jsonl")}
    assert schedule.objective == Objective(alpha=0.2, P=3)
    first, second = schedule.stage
    assert first.data == (str(tmp_path / "a.jsonl"), "hub:owner/name")
    recipe = first.resolve([10], objective=schedule.objective)
    assert (recipe.steps, recipe.minutes, recipe.lr) == (4, None, 8e-4)  # ceil(1.5 * 10 / 4)
    assert recipe.objective is schedule.objective
    assert second.resolve([10], schedule.objective).minutes == 3


@pytest.mark.parametrize(
    "old, new, named",
    [
        ('draft = "draft"', "", "draft"),
        ('target = "target"', "target = ", "train.toml"),
        ("max_length = 99", "max_len = 99", "max_len"),
        ("max_length = 99", "max_length = 0", "max_length"),
        ('math = "math.jsonl"', "math = 3", "held_out"),
        ('"online"', '"magic"', "features"),
        ("P = 3", "tau = 1", "tau"),
        ("P = 3", 'loss = "none"', "objective.loss"),
        ("alpha = 0.2", "alpha = -1", "objective.alpha"),
        ("lr = 8e-4", "lr = 0", "stage 1.lr"),
        ("lr = 8e-4", "lr = inf", "stage 1.lr"),
        ("lr = 8e-4", "learning_rate = 1", "learning_rate"),
        ("batch = 4", "batch = 2.5", "stage 1.batch"),
        ("batch = 4", "bf16 = 1", "stage 1.bf16"),
        ("epochs = 1.5", "", "stage 1"),
        ("minutes = 3", "minutes = 3\nsteps = 4", "stage 2"),
        ('["b.jsonl"]', '"b.jsonl"', "stage 2.data"),
        ('["b.jsonl"]', "[]", "stage 2.data"),
        ("minutes = 3", "minutes = 3\nweights = [1.0, 2.0]", "stage 2: expected 0 weights"),
    ],
)
def test_a_bad_field_of_a_training_file(tmp_path, old, new, named):
    assert old in WHOLE
    with pytest.raises(HyperDFlashConfigError, match=named):
        read_schedule(write_rows(tmp_path / "train.toml", WHOLE.replace(old, new)))
