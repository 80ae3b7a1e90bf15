"""``hyperdflash train``: what a run becomes, how it is resumed, and what its card says."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture, train
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.checkpoints import read_state, saved_states
from sglang_hyperdflash.training.deal import check_batch
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.model_card import model_card
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.recipe import Recipe, read_schedule
from sglang_hyperdflash.training.replay import check_whole_blocks
from sglang_hyperdflash.training.rows import LeftOut
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample, collate
from sglang_hyperdflash.training.store.manifest import Data, data_digest
from sglang_hyperdflash.training.store.writer import open_writer
from sglang_hyperdflash.training.trainer import Trainer, best_weights
from tests.conftest import EXAMPLE
from tests.unit.commands.builders import SAMPLE, SIZES, initialise, rows_of, small, write_rows
from tests.unit.hub_cache import hub_home, use_hub_home
from tests.unit.shards import split
from tests.unit.targets.test_kinds import deepseek_v41
from tests.unit.training.conftest import answers
from tests.unit.training.store.small import flip

pytestmark = pytest.mark.heavy
SAMPLES = answers(20, 33, 28)


def command(config: Path) -> list[str]:
    return ["train", "--config", str(config), "--work", str(config.parent / "work")]


def two_stages(config: Path, *change: str) -> Path:
    """The file with its stage once more, changed."""
    text = config.read_text()
    config.write_text(text + text[text.index("[[stage]]") :].replace(*change))
    return config


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_goes_on_and_mends_or_finds_a_flipped_byte(tmp_path, target_dir, capsys, refused):
    work, out = tmp_path / "work", tmp_path / "out"
    assert main(command(small(tmp_path, target_dir))) == 0
    assert re.search(r"best: step \d, tau \d\.\d\d", capsys.readouterr().out)
    again = command(small(tmp_path, target_dir, steps=3))
    assert main(again) == 0 and "resumed at step 2" in capsys.readouterr().out
    log = rows_of(work / "stage-1" / "training_log.jsonl")
    assert [line["step"] for line in log] == [1, 2, 3]
    expected = weights_of(out)
    for name in ("state-3/__0_0.distcp", "best/model.safetensors"):
        damaged = work / "stage-1" / name
        flip(damaged, damaged.stat().st_size // 2)
        if name.startswith("state"):
            assert str(damaged.parent) in refused(*again)
            assert weights_of(out) == expected
            shutil.rmtree(damaged.parent)
        assert main(again) == 0 and weights_of(out) == expected
    assert damaged.read_bytes() == expected


def test_a_loss_that_is_not_finite_names_the_lr_and_a_new_folder(tmp_path, target_dir, capsys):
    assert main(command(small(tmp_path, target_dir, lr=1e20, warmup_steps=0))) == 2
    said = capsys.readouterr().err
    assert "lr, now 1e+20" in said and "--work" in said


def test_a_stage_is_not_made_longer_after_the_next_one_began(tmp_path, target_dir, capsys):
    def run(steps: int) -> int:
        config = small(tmp_path, target_dir, steps=steps)
        return main(command(two_stages(config, f"steps = {steps}", "steps = 1")))

    assert run(1) == 0
    following = tmp_path / "work" / "stage-2"
    assert run(2) == 2 and str(following) in capsys.readouterr().err
    assert run(1) == 0
    shutil.rmtree(following)
    assert run(2) == 0


def test_a_stage_starts_from_the_fp32_weights_of_the_one_before(tmp_path, target_dir):
    """What is published is rounded to bf16. The seed is a date, which is more than 2 ** 24."""
    changes = {"lr": 1e-2, "lr_floor": 0.0, "warmup_steps": 0, "seed": 2**62}
    config = two_stages(small(tmp_path, target_dir, **changes), "lr = 0.01", "lr = 1e-30")
    assert main(command(config)) == 0
    best, second = best_weights(tmp_path / "work" / "stage-1"), tmp_path / "work" / "stage-2"
    _, trained = read_state(saved_states(second)[-1])
    rounded = 0
    for name, weight in best.items():
        assert torch.equal(weight, trained[f"drafter.{name}"]), name
        rounded += int((weight.bfloat16().float() != weight).sum())
    assert rounded > 1000
    published = load_file(tmp_path / "out" / "model.safetensors")
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(published[name], best_weights(second)[name].bfloat16())


def test_a_draft_in_shards_is_trained_as_one_file_is(tmp_path, target_dir, refused):
    line = command(small(tmp_path, target_dir))
    assert main(line) == 0
    expected = weights_of(tmp_path / "out")
    for name in ("out", "work"):
        shutil.rmtree(tmp_path / name)
    shards = split(tmp_path / "draft")
    assert main(line) == 0 and weights_of(tmp_path / "out") == expected
    tensors = load_file(shards[1])
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, shards[1])
    assert "draft was" in refused(*line)
    publish(tmp_path / "published", tmp_path / "draft")
    published = Drafter.load(current(tmp_path / "published").path)
    name = next(iter(tensors))
    assert torch.equal(published.state_dict()[name], tensors[name].float() + 1)
    shards[0].unlink()
    for name in ("out", "work"):
        shutil.rmtree(tmp_path / name)
    assert "missing" in refused(*line)


@pytest.mark.parametrize("length, whole", [(6, False), (7, True)])
def test_a_held_out_answer_is_refused_exactly_where_the_replay_counts_no_round(length, whole):
    samples = [Sample(list(range(20)), ((3, 3 + length), (18, 20)))]
    blocks = Blocks.draw(collate(samples), 20, 7, [0])
    assert bool((blocks.keep & blocks.supervised.all(-1)).any()) == whole
    with nullcontext() if whole else pytest.raises(HyperDFlashConfigError, match="found 6"):
        check_whole_blocks(samples, 7, "a.jsonl")


def test_a_file_of_two_stages_is_read_and_listed_once(tmp_path, target_dir):
    good, bad = {"instruction": "Hi", "output": "Yo"}, {"conversations": []}
    a, b = write_rows(tmp_path / "a", good, bad), write_rows(tmp_path / "b", bad, good)
    empty = write_rows(tmp_path / "empty", {"text": ""})
    stages = [SimpleNamespace(data=(a, b)), SimpleNamespace(data=(a,))]
    held_out = {"a": a}
    schedule = SimpleNamespace(target=target_dir, held_out=held_out, max_length=99, stage=stages)
    loaded = train.load_all(schedule, left_out := LeftOut())
    assert left_out.read == 4 and list(left_out.entries) == [f"{a}:2", f"{b}:1"]
    assert loaded[a, b].places == [f"{a}:1", f"{b}:2"] and loaded[a, b].rows == [0, 1]
    stages.append(SimpleNamespace(data=(empty,)))
    with pytest.raises(HyperDFlashConfigError, match=f"{empty}:1"):
        train.load_all(schedule, LeftOut())


def captured(folder, target, states, dtype="bfloat16") -> None:
    identity = capture.identity_of(TargetFiles(str(target)), dtype)
    with open_writer(folder, identity, "one", "hyperdflash capture", {}) as writer:
        writer.begin(Data(data_digest(SAMPLES), len(SAMPLES), 2**30))
        writer.add(0, SAMPLES, [(each,) for each in states])


def new_draft(folder, target, *options: str) -> list[str]:
    """Makes it; gives the command that trains it from a capture."""
    assert initialise(target, folder / "draft", *options, *SIZES) == 0
    config = small(folder, target, steps=4)
    held_out, captured = '[held_out]\ncount = "a.jsonl"', 'features = "captured"\n'
    text = config.read_text().replace('["a.jsonl"]', '["states"]')
    config.write_text(text.replace(held_out, f"{captured}[objective]\nalpha = 0.2"))
    return command(config)


def test_v41_is_trained_by_its_lagged_gate(tmp_path, target_dir, refused):
    """And only from a capture: no process of ours computes its states."""
    target = deepseek_v41(tmp_path / "target", target_dir)
    weights, g = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    d = len(weights["norm.weight"])
    weights |= {name: torch.randn(1363, d, generator=g) for name in ("embed.weight", "head.weight")}
    save_file(weights, target / "model.safetensors")
    states = [torch.randn(len(s.tokens), 4 * d, generator=g).bfloat16() for s in SAMPLES]
    captured(tmp_path / "states", target, states)
    line = new_draft(tmp_path, target, "--gate", "approximate", "--mask-token-id", "4")
    config = tmp_path / "train.toml"
    text = config.read_text()
    config.write_text(text.replace('"captured"', '"online"'))
    assert "hyperdflash capture" in refused(*line)
    config.write_text(text)
    assert main(line) == 0
    *_, logged = rows_of(tmp_path / "work" / "stage-1" / "training_log.jsonl")
    assert logged["step"] == 4 and logged["kl"] > 0.1
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("draft", "out"))
    assert not torch.equal(before["reducer.fn"], after["reducer.fn"])


def test_training_from_a_capture_loads_no_target(tmp_path, target_dir, monkeypatch):
    """The same drafter as from the target's own states, from shards and the borrowed tensors."""
    target = LocalTarget(target_dir)
    online = OnlineFeatures(target, SAMPLES)
    states = [online.states([i]).residual[0] for i in range(3)]
    captured(tmp_path / "states", target_dir, states, "float32")
    line = new_draft(tmp_path, target_dir)

    def forbidden(*_):
        raise AssertionError("a captured target must not be loaded")

    monkeypatch.setattr(LocalTarget, "__init__", forbidden)
    assert main(line) == 0
    changes = {"lr": 1e-3, "warmup_steps": 5, "objective": Objective(alpha=0.2)}
    recipe = Recipe(steps=4, batch=2, every=1, bf16=False, **changes)
    drafter = Drafter.load(tmp_path / "draft")
    Trainer(drafter, target, online, {}, recipe, tmp_path / "plain").run(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    trained = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(trained, expected, rtol=1e-2, atol=1e-4)
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(trained[name], drafter.layers[0].mlp.up_proj.weight)


def test_a_card_names_a_hub_target_and_no_folder_of_this_machine(tmp_path, target_dir):
    name = "deepseek-ai/DeepSeek-V4-Flash"
    drafter = json.loads((SAMPLE / "drafter" / "config.json").read_text())
    card = ModelCard(model_card(drafter, name))
    assert (card.data.base_model, card.data.library_name) == (name, "sglang")
    assert card.data.license is None
    assert "\n| layers | 5, 32 heads of 128, 8 K/V heads, MLP 12288 |\n" in card.text
    assert f"--model-path {name}" in card.text
    options = "--dependency-rank", "0", "--layers", "1"
    assert initialise(target_dir, tmp_path / "draft", *options) == 0
    card = ModelCard.load(tmp_path / "draft" / "README.md")
    assert card.data.base_model is None and str(target_dir.parent) not in card.content
    committed = json.loads((EXAMPLE / "drafter/config.json").read_text())["hyperdflash_config"]
    fingerprint = committed["target"]["hc_head_fingerprint"]
    assert f"\n| target's `hc_head` | fingerprint {fingerprint} |\n" in card.text


def test_a_drafter_of_the_hub_is_trained_and_has_a_card(tmp_path, target_dir, monkeypatch, refused):
    config = small(tmp_path, target_dir)
    hub_home(tmp_path / "home", tmp_path / "draft", "owner/drafter")
    use_hub_home(monkeypatch, tmp_path / "home")
    text = config.read_text().replace('draft = "draft"', 'draft = "owner/drafter"')
    config.write_text(text)
    assert main(command(config)) == 0
    assert read_schedule(config).draft == Path("owner/drafter")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    log = rows_of(tmp_path / "work" / "stage-1" / "training_log.jsonl")
    best = max(log, key=lambda line: line["score"])
    assert "\n| 1 | a.jsonl | 2 | 2 | 32 | 0.001 |\n" in card.text
    assert f"\n| count | {best['tau']:.2f} |  |\n" in card.text
    assert "`ce_kl`" in card.text and f"step {best['step']} " in card.text
    plan = ["plan", "--training", str(config), "--conversations", "1000", "--json"]
    assert main([*plan, "--draft", "owner/drafter"]) == 0
    config.write_text(text.replace("owner/drafter", "owner/gone"))
    assert "owner/gone" in refused(*command(config))
    (tmp_path / "owner" / "gone").mkdir(parents=True)  # a folder comes before a hub id
    assert read_schedule(config).draft == tmp_path / "owner" / "gone"


def test_fields_set_on_the_command_line(tmp_path, target_dir, refused):
    config = small(tmp_path, target_dir, steps=9)
    changes = ["stage.0.lr=1e-4", "objective.T=2.0", "stage.0.epochs=1.5", "features=online"]
    schedule = read_schedule(config, changes)
    (stage,) = schedule.stage
    assert (stage.lr, schedule.objective.T, schedule.features) == (1e-4, 2.0, "online")
    assert (stage.epochs, stage.steps) == (1.5, None)  # a stage has one length
    for wrong in ("stage.1.lr=1", "stage.0.lr", "stage.0.rate=1", "stage.0.lr=fast"):
        assert wrong.split("=")[0].split(".")[-1] in refused(*command(config), "--set", wrong)
    assert main([*command(config), "--set", "stage.0.steps=1"]) == 0
    assert len(rows_of(tmp_path / "work" / "stage-1" / "training_log.jsonl")) == 1


def test_a_drafter_is_evaluated_without_training(tmp_path, target_dir, capsys):
    config = small(tmp_path, target_dir)
    assert main(command(config)) == 0
    logged = rows_of(tmp_path / "work" / "stage-1" / "training_log.jsonl")
    best = max(line["held_out"]["count"]["tau"] for line in logged)
    capsys.readouterr()
    before = {path: path.read_bytes() for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert main([*command(config), "--evaluate", str(tmp_path / "out")]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("count: {")]
    # What is published is rounded to bf16.
    assert json.loads(said.removeprefix("count: "))["tau"] == pytest.approx(best, rel=0.05)
    files = {path: path.read_bytes() for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert files == before


def test_a_stage_that_cannot_run_is_refused_before_the_first(tmp_path, target_dir, refused):
    """One that the processes cannot share, or on a store with a budget that is used up by then."""
    config = two_stages(small(tmp_path, target_dir), "batch = 2", "batch = 3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_batch", lambda batch, _size: check_batch(batch, 2))
        assert "found 3" in refused(*command(config))
    assert not list((tmp_path / "work").glob("stage-*"))


def test_a_store_with_a_budget_is_for_one_stage_of_one_training(tmp_path, target_dir, refused):
    identity = capture.identity_of(TargetFiles(str(target_dir)), "float32")
    for name, window in (("states", None), ("short", 16)):
        with open_writer(tmp_path / name, identity, "one", "hyperdflash capture", {}) as writer:
            data = Data(data_digest(SAMPLES), len(SAMPLES), 2**20, 2**30, window)
            writer.begin(data)
            writer.add(0, SAMPLES, [(torch.randn(len(s.tokens), 1024),) for s in SAMPLES])
    line = new_draft(tmp_path, target_dir)
    wrong = {
        "stage.0.minutes=1": "--budget",
        'stage.0.data=["states", "states"]': "--budget",
        'stage.0.data=["short"]': "--window 16",
    }
    for change, named in wrong.items():
        work = ["--work", str(tmp_path / f"work-{len(change)}")]
        assert named in refused(*line[:3], *work, "--set", change)
        for store in ("states", "short"):
            (tmp_path / store / "reader").unlink(missing_ok=True)
    assert main(line) == 0
    again = refused(*line[:3], "--work", str(tmp_path / "again"), "--set", "out=again_out")
    assert "other settings" in again


def test_a_profile_of_some_steps(tmp_path, target_dir):
    config = small(tmp_path, target_dir, steps=8)
    assert main([*command(config), "--profile", "2"]) == 0
    (trace,) = (tmp_path / "work" / "stage-1" / "profile").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::mm", "ProfilerStep#5", "ProfilerStep#6"} <= names


def test_several_captures_are_mixed_by_their_weights(tmp_path, target_dir, refused):
    for name, value in (("states", 0.5), ("more", -0.5)):
        states = [torch.full((len(s.tokens), 1024), value) for s in SAMPLES]
        captured(tmp_path / name, target_dir, states, "float32")
    line = new_draft(tmp_path, target_dir)
    config = tmp_path / "train.toml"
    text = config.read_text().replace('["states"]', '["states", "more"]')
    config.write_text(text.replace("steps = 4", "epochs = 2\nweights = [1.0]"))
    assert "2 weights" in refused(*line)
    config.write_text(text.replace("steps = 4", "epochs = 2\nweights = [2.0, 1.0]"))
    assert main(line) == 0
    *_, logged = rows_of(tmp_path / "work" / "stage-1" / "training_log.jsonl")
    assert logged["step"] == 2 * (2 * 3 + 3) / 2
