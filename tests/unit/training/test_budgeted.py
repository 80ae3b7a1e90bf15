"""Training on a data set that is captured meanwhile, of which the store holds a part at a time."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training import trainer as trainer_module
from sglang_hyperdflash.training.budgeted import BudgetTrainer
from sglang_hyperdflash.training.cached import identity_of
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.store.manifest import Data, budgeted, content_hash, data_digest
from sglang_hyperdflash.training.store.stream import PortionReader
from sglang_hyperdflash.training.store.writer import bytes_of, open_writer, shard_ranges
from tests.unit.training import streams
from tests.waiting import until

pytestmark = pytest.mark.heavy
COUNT, EPOCHS, BATCH = 96, 3, 8
RECIPE = Recipe(
    steps=COUNT * EPOCHS // BATCH, batch=BATCH, anchors=4, every=5, warmup_steps=2, bf16=False
)


@pytest.fixture(scope="module", autouse=True)
def _no_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "POLL", 0.01)
        yield


@pytest.fixture(scope="module")
def content(target):
    return streams.recorded(target, COUNT)


class Capture:
    """An engine's share of a capture with a budget of 32 samples, until it is stopped or done."""

    def __init__(self, folder: Path, target, content, share=(1, 1), shards: int = 10**6) -> None:
        self.samples, self.states = zip(*content, strict=True)
        self.identity, (part, self.parts) = identity_of(target, ()), share
        size = bytes_of(self.samples[0], self.identity)
        digest = data_digest(self.samples)
        self.data = Data(digest, COUNT, shard_bytes=4 * size, budget=34 * size)
        ranges = shard_ranges(self.samples, self.identity, self.data.shard_bytes)
        self.ranges, self.shards = ranges[part - 1 :: self.parts], shards
        self.folder, self.name, self.most = folder, f"share-{part}", 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        with open_writer(self.folder, self.identity, self.name, "test", {}) as writer:
            writer.begin(self.data)
            for start, end in writer.missing(self.ranges)[: self.shards]:
                size = sum(bytes_of(sample, self.identity) for sample in self.samples[start:end])
                while not writer.make_room(size, self.data.budget // self.parts):
                    if self.stop.wait(0.01):
                        return
                rows = [(states,) for states in self.states[start:end]]
                writer.add(start, self.samples[start:end], rows)
                files = (self.folder / "shards").iterdir()
                self.most = max(self.most, sum(path.stat().st_size for path in files))

    def __enter__(self):
        self.thread.start()
        until(lambda: self.folder.is_dir() and budgeted(self.folder) is not None)
        return self

    def __exit__(self, *_error) -> None:
        self.stop.set()
        self.thread.join()


def new_trainer(
    target, store: Path, folder: Path, say=lambda _line: None, **changes
) -> BudgetTrainer:
    reader, recipe = PortionReader(store, budgeted(store), None), replace(RECIPE, **changes)
    given = streams.new_drafter(target), target, reader, {}, recipe, folder, ProcessGroup()
    return BudgetTrainer(*given, say=say)


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.drafter.parameters()])


@pytest.fixture(scope="module")
def undisturbed(target, content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with Capture(folder / "store", target, content) as engine:
        trainer, drawn = new_trainer(target, folder / "store", folder / "work"), []
        show = trainer.train.show

        def noted(start, world):
            end = show(start, world)
            if end is not None:
                drawn.append((start, end, len(trainer.train.lengths)))
            return end

        trainer.train.show = noted
        trainer.run(folder / "best")
    return trainer, engine, drawn


def test_the_store_stays_within_its_budget_and_every_sample_is_used(undisturbed, content):
    trainer, engine, windows = undisturbed
    assert trainer.state["step"] == RECIPE.steps and len(windows) > 3
    assert [start for start, _, _ in windows] == [0, *(end for _, end, _ in windows[:-1])]
    assert windows[-1][1] == COUNT and all(end - start == n for start, end, n in windows)
    assert 0 < engine.most <= 1.3 * engine.data.budget  # and headers
    left = {path.name for path in (engine.folder / "shards").iterdir()}
    assert len(left) < len(engine.ranges) / 2
    losses = [record["loss"] for record in trainer.records]
    assert losses[-1] < losses[0]


def test_all_passes_are_over_one_window_before_the_next(undisturbed):
    """A sample comes as often as in an ordinary training, but for a batch at a window's end."""
    trainer, _, windows = undisturbed
    for start, end, count in windows:
        first, last = trainer._step_at(start), trainer._step_at(end)
        assert abs((last - first) * BATCH - EPOCHS * count) < 2 * BATCH


def test_engines_and_trainer_that_are_killed_change_nothing(target, content, undisturbed, tmp_path):
    """Two engines; one ends early and comes back; the trainer is ended in between, twice."""
    store = tmp_path / "store"

    def terminate(*_said):
        os.kill(os.getpid(), signal.SIGTERM)

    def end_early(_trainer, report):
        if report["step"] == 7:
            terminate()

    with Capture(store, target, content, (1, 2)):
        with Capture(store, target, content, (2, 2), shards=5):
            with pytest.raises(SystemExit):
                new_trainer(target, store, tmp_path / "work").run(tmp_path / "best", end_early)
            # It waits for the engine that is gone.
            waiting = new_trainer(target, store, tmp_path / "work", say=terminate)
            with pytest.raises(SystemExit):
                waiting.run(tmp_path / "best")
        with Capture(store, target, content, (2, 2)):
            trainer = new_trainer(target, store, tmp_path / "work")
            assert trainer.state["step"] > 7
            trainer.run(tmp_path / "best")
    assert torch.equal(weights(trainer), weights(undisturbed[0]))


def test_a_full_store_has_room_for_a_damaged_shard(target, content, tmp_path):
    """A training waits for it, and so gives up nothing."""
    store = tmp_path / "store"
    with Capture(store, target, content, shards=8):
        until(lambda: len(list((store / "shards").glob("*.safetensors"))) == 8)
    first = min((store / "shards").iterdir())
    first.unlink()
    with Capture(store, target, content) as engine:
        until(first.is_file)
        assert engine.thread.is_alive()  # it waits again


def test_what_a_kill_left_over_is_removed(target, content, tmp_path):
    store = tmp_path / "store"
    with Capture(store, target, content, shards=2):
        until(lambda: len(list((store / "shards").glob("*.safetensors"))) == 2)
    left_over = store / "shards" / "share-1-00000090.safetensors"
    left_over.write_bytes(b"x")
    with Capture(store, target, content, shards=1) as engine:
        engine.thread.join()
    assert not left_over.exists()


def test_its_length_is_kept(target, content, tmp_path):
    """Samples that were given up cannot be used more often."""
    with Capture(tmp_path / "store", target, content):
        trainer = new_trainer(target, tmp_path / "store", tmp_path / "work")
        trainer._save_state()
        trainer.checkpoints.wait()
        with pytest.raises(HyperDFlashConfigError, match=f"expected {RECIPE.steps} steps"):
            new_trainer(target, tmp_path / "store", tmp_path / "work", steps=RECIPE.steps + 1)


def test_samples_without_finite_states_end_it_in_one_line(target, content, tmp_path):
    bad = [(sample, rows * float("nan")) for sample, rows in content]
    with Capture(tmp_path / "store", target, bad):
        trainer = new_trainer(target, tmp_path / "store", tmp_path / "work")
        until(lambda: len(list((tmp_path / "store" / "shards").glob("*.safetensors"))) == 24)
        with pytest.raises(HyperDFlashConfigError, match="finite"):
            trainer.run(tmp_path / "best")


def test_what_was_used_cannot_be_trained_on_again(target, undisturbed, tmp_path):
    _, engine, _ = undisturbed
    with pytest.raises(HyperDFlashConfigError, match="no longer holds sample 0"):
        new_trainer(target, engine.folder, tmp_path / "work").run(tmp_path / "best")


def test_a_hash_of_a_store_with_a_budget_stays_while_shards_come_and_go(target, content, tmp_path):
    store = tmp_path / "store"
    with Capture(store, target, content):
        before = content_hash(store)
        until(lambda: len(list((store / "shards").iterdir())) > 2)
        assert content_hash(store) == before
