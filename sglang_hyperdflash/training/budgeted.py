"""Training on what engines capture now: a portion of the data set at a time, then the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.checkpoints import check_state
from sglang_hyperdflash.training.samples import Passes
from sglang_hyperdflash.training.store.manifest import USED
from sglang_hyperdflash.training.store.stream import PortionReader
from sglang_hyperdflash.training.trainer import Trainer


class BudgetTrainer(Trainer):
    """A :class:`Trainer` whose ``train`` is a :class:`PortionReader`.

    All passes are over one portion before the next: portions, batches and steps follow from the
    data set and its store's budget, so a run that is killed and resumed ends as an undisturbed one.
    A portion is given up only when a checkpoint after it is whole.

    Raises:
        HyperDFlashConfigError: the stage has another length than before.
    """

    train: PortionReader

    def __init__(self, *given: Any, say: Callable[[str], None] = tqdm.write, **named: Any) -> None:
        self._shown: list[int] | None = None
        self._say, self._waiting = say, False
        super().__init__(*given, **named)
        self.state.setdefault("portion", [0, 0])
        if self.state.setdefault("steps", self.recipe.steps) != self.recipe.steps:
            raise HyperDFlashConfigError(
                f"{self.folder}: expected {self.state['steps']} steps, with which it began, found "
                f"{self.recipe.steps}: samples that a store with a budget has given up cannot be "
                "used more often."
            )

    def _step_at(self, position: int) -> int:
        """The step before which all passes over the samples before a position are done."""
        share = position / self.train.data.samples
        return math.ceil(self.recipe.steps * share)

    def before_step(self) -> None:
        """Show the portion that the next step needs; wait for it where it is not captured yet."""
        start, end = self.state["portion"]
        if end and self.state["step"] >= self._step_at(end):
            self._keep_late()
            self._save_state()
            self.checkpoints.wait()
            path = self.folder / f"state-{self.state['step']}"
            check_state(path, (self.world.rank, self.world.size))
            self._agreed()  # everyone's share is whole
            used = {self.train.data.digest: end}
            self.world.on_main(lambda: write_json(self.train.folder / USED, used))
            start = end
        elif self._shown == [start, end]:
            return
        self._waiting = False
        self.wait_until(lambda: self._show(start))

    def _show(self, start: int) -> bool:
        """Show the portion from a position on; False where it is not captured yet."""
        end = self.train.show(start, self.world)
        if end is None:
            if self.world.is_main and not self._waiting:
                self._say(
                    f"waiting for `hyperdflash capture`: {self.train.folder} lacks samples from "
                    f"{start} on"
                )
            self._waiting = True
            return False
        self.state["portion"] = self._shown = [start, end]
        self._shares.cache_clear()
        seed, first = self.recipe.seed + start, self._step_at(start)
        self.passes = Passes(self.train.counts, self.recipe.batch, seed, first=first)
        self.horizon = self._step_at(end)
        return True
