"""``hyperdflash learn``: a training without an end on what servers record, and its publishing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter, write_drafter
from sglang_hyperdflash.training.judge import LEAST, Comparison, compare, is_better
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Policy, Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import generator_seed
from sglang_hyperdflash.training.store.stream import StreamReader
from sglang_hyperdflash.training.trainer import Report, Trainer

# Steps that the average of weights reaches back.
MEMORY = 500
# Batches of samples that must be there before the first step.
START = 4


def by_age(stream: StreamReader, chosen: torch.Tensor, newest: int) -> tuple[torch.Tensor, ...]:
    """Indices of the chosen samples, ``[samples]`` bool: of the ``newest`` ones, of all older."""
    places, first = chosen.nonzero().squeeze(1), len(stream.lengths) - newest
    return places[places >= first], places[places < first]


class Draws:
    """The samples of every step, drawn at random: half of the newest, half of all older ones.

    They follow from the step's number, the seed and what the store holds. Halves are those of a
    window of batches.
    """

    WINDOW = 8

    def __init__(self, stream: StreamReader, policy: Policy, batch: int, seed: int) -> None:
        self.batch_size, self.seed = batch, seed
        self.newest, self.older = by_age(stream, ~stream.held_out, policy.newest)
        self._window = cache(self._drawn_for)

    def batch(self, step: int) -> list[int]:
        """Indices of the global batch of a step."""
        window, at = divmod(step, self.WINDOW)
        return self._window(window)[at]

    def _drawn_for(self, window: int) -> list[list[int]]:
        seed = generator_seed(self.seed * 1_000_003 + window)
        generator = torch.Generator().manual_seed(seed)
        count = self.WINDOW * self.batch_size
        older = count // 2 if len(self.older) else 0
        parts = ((self.newest, count - older), (self.older, older))
        drawn = torch.cat([p[_drawn(len(p), n, generator)] for p, n in parts])
        order = torch.randperm(count, generator=generator)
        return [batch.tolist() for batch in drawn[order].split(self.batch_size)]


def _drawn(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` numbers below ``size``, each as often as the others as far as possible."""
    orders = [torch.randperm(size, generator=generator) for _ in range(-(-count // max(size, 1)))]
    return torch.cat([torch.empty(0, dtype=torch.int64), *orders])[:count]


def _average(averaged: list, weights: list, updates: torch.Tensor) -> None:
    """An exponential average that soon forgets the weights it began with."""
    n = int(updates)
    torch._foreach_lerp_(averaged, weights, max(1 / MEMORY, 9 / (10 + n)))


class Learner(Trainer):
    """A :class:`Trainer` on a store that servers write to meanwhile.

    The rate stays constant after the warm-up; an average of the weights is judged and published. At
    every checkpoint the store is looked at again and the average compared with the drafter that is
    served (:mod:`.judge`). With an unchanged store, a run that resumes from a checkpoint has the
    weights of one that was never killed.

    Args:
        draft: the drafter that is served until a version is published. published: their folder.
        say: prints a line.
    """

    def __init__(
        self,
        drafter: Drafter,
        target,
        stream: StreamReader,
        recipe: Recipe,
        folder: Path,
        world: ProcessGroup,
        *,
        draft: Path,
        published: Path,
        policy: Policy,
        say: Callable[[str], None] = tqdm.write,
    ) -> None:
        self.draft, self.published, self.policy = draft, published, policy
        self.say = say if world.is_main else lambda _line: None
        self.average = AveragedModel(drafter, multi_avg_fn=_average)
        self._waiting = ""
        super().__init__(drafter, target, stream, {}, recipe, folder, world)
        self._draw()

    def _draw(self) -> None:
        self._shares.cache_clear()
        self.passes = Draws(self.train, self.policy, self.recipe.batch, self.recipe.seed)

    def progress(self) -> float:
        """0: there is no end, and so no decay of the learning rate."""
        return 0.0

    def run(self, out: Path, display=None) -> None:
        """See :meth:`Trainer.run`."""
        # Where a run goes on that is killed between its first version and its first checkpoint.
        if self.checkpoints.step is None:
            self._save_state()
            self.checkpoints.wait()
        super().run(out, display)

    def step(self) -> Report | None:
        """See :meth:`Trainer.step`."""
        report = super().step()
        if report is not None:
            self.average.update_parameters(self.drafter)
        return report

    def _tensors(self) -> dict[str, torch.Tensor]:
        average = {f"average.{name}": x for name, x in self.average.state_dict().items()}
        return super()._tensors() | average

    def measured(self) -> dict[str, float]:
        """tau of the candidate and of the served drafter, that one's version, stored samples."""
        shown = ("tau", "tau_served", "version", "samples")
        last = self.records[-1] if self.records else {}
        return {name: last[name] for name in shown if last.get(name) is not None}

    def after_checkpoint(self) -> None:
        """Look at the store again; wait for new samples where the old ones were drawn enough."""
        self.wait_until(self._refresh)

    def _refresh(self) -> bool:
        self.train.refresh(self.world)
        self._draw()
        start, drawn = START * self.recipe.batch, self.state["step"] * self.recipe.batch
        here, written, waiting = len(self.passes.newest), self.train.written, ""
        if here < start:
            waiting = f"{self.train.folder} holds {here} samples to train on, fewer than {start}"
        elif drawn >= self.policy.passes * written:
            waiting = f"the {written} recorded samples were drawn {self.policy.passes} times each"
        if waiting and waiting != self._waiting:
            self.say(f"waiting for new samples: {waiting}")
        self._waiting = waiting
        return not waiting

    def _record(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        record = super()._record(reports) | {"samples": self.train.written}
        number, folder = self.world.on_main(
            lambda: served_drafter(self.published, self.draft, self.say)
        )
        served = Replay(Drafter.load(folder).to(self.device), self.target, self.recipe.bf16)
        candidate = Replay(self.average.module, self.target, self.recipe.bf16)
        newest, older = (
            compare(candidate, served, self.train, chosen, self.world) for chosen in self._judges()
        )
        found = {"newest": dataclasses.asdict(newest), "older": dataclasses.asdict(older)}
        record |= {"version": number, "judged": found, "better": is_better(newest, older)}
        if newest.requests >= LEAST:
            record |= {"tau": newest.tau, "tau_served": newest.served}
        return record

    def _judges(self) -> tuple[list[int], list[int]]:
        """Held-out samples: the newest, and some of all older ones."""
        most = self.policy.judges
        newest, older = by_age(self.train, self.train.held_out, self.policy.newest)
        spread = torch.linspace(0, max(len(older) - 1, 0), min(most, len(older))).long()
        return newest[-most:].tolist(), older[spread].tolist()

    def _not_finite(self, what: str) -> FloatingPointError:
        return FloatingPointError(
            f"the {what}. Run the same command with a lower --lr, now "
            f"{self.recipe.lr:g}, to go on from the last checkpoint."
        )

    def _checkpoint(self, out: Path, record: dict[str, Any]) -> None:
        def publish_better() -> int | None:
            served = self.drafter.served_tensors(self.average.module.state_dict())
            if not record["better"]:
                return None
            write_drafter(self.folder / "candidate", self.drafter.raw, served)
            return publish(out, self.folder / "candidate")

        number = self.world.on_main(publish_better)
        record |= {} if number is None else {"published": number}
        self._save_record(record)
        self.say(verdict(record))


def served_drafter(published: Path, draft: Path, say: Callable[[str], None]) -> tuple[int, Path]:
    """The current version's number and folder; ``draft`` as 0 where none can be read."""
    try:
        version = current(published)
        if version is not None:
            version.check()
            load_config(version.path)
            return version.number, version.path
    except (HyperDFlashConfigError, OSError) as error:
        say(str(error))
    return 0, draft


def verdict(record: dict[str, Any]) -> str:
    """A checkpoint's judging on one line."""
    newest, older = (Comparison(**record["judged"][name]) for name in ("newest", "older"))
    begin = f"step {record['step']}, {record['samples']} samples: "
    if newest.requests < LEAST:
        return f"{begin}not judged: {newest.requests} of {LEAST} held-out requests are usable"
    parts = [
        f"tau {c.tau:.2f}, served {c.served:.2f}, difference {c.low:+.3f} to {c.high:+.3f} on "
        f"{c.requests} {name} requests"
        for name, c in (("new", newest), ("older", older))
        if c.requests
    ]
    end = f"published as version {record['published']}" if record["better"] else "not published"
    return f"{begin}{'; '.join(parts)}: {end}"
