"""The training file: its fields, their checks, and the schedule of stages that it becomes.

target = "DIR"            # the model that is accelerated
draft = "DIR"             # from `hyperdflash init`
out = "DIR"               # the trained drafter
max_length = 512          # tokens of a conversation
features = "cache"        # or "online": the target's states anew for each batch; or
                          # "captured": data and held_out are folders of `hyperdflash capture`
[held_out]                # simulated tau is the mean over these
math = "math.jsonl"
[objective]               # loss, mix, distance, alpha, ...: see training.objective
[[stage]]                 # one or more, in order; each starts from the best of the one before
data = ["a.jsonl"]       # files, or "hub:OWNER/NAME" data sets
epochs = 5                # or steps, or minutes
lr = 8e-4                 # and the other fields of Recipe
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.structs import Keys, checked
from sglang_hyperdflash.training.conversations import data_place
from sglang_hyperdflash.training.objective import Objective

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
AtLeast0 = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
# A run may be made longer and go on; all else of a stage must stay.
LENGTHS = ("steps", "minutes", "epochs", "every")


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage may set, beside its data."""

    steps: Count | None = None
    minutes: Positive | None = None
    lr: Positive = 2e-3
    lr_floor: AtLeast0 = 2e-5
    warmup_steps: Annotated[int, Meta(ge=0)] = 50
    weight_decay: AtLeast0 = 0.0
    clip: Positive = 1.0
    batch: Count = 8
    micro_batch: Count = 8
    anchors: Count = 32
    pack: Count | None = None
    every: Count = 400
    bf16: bool = True
    seed: Annotated[int, Meta(ge=0)] = 0
    widths: tuple[Annotated[int, Meta(ge=2)], ...] = ()
    dependency_lr: Positive = 0.3
    dependency_gate: bool = True


class Recipe(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hyperparameters of one stage; ``steps`` or ``minutes`` is its length.

    batch: samples of the global batch; micro_batch: samples in memory at a time, per process;
    anchors: blocks a sample; pack: tokens of a row that short samples are packed into, None for
    one sample a row; every: steps between checkpoints; widths: what each block's rows are drawn
    from, empty for the whole block. Of a dependency head: dependency_lr, its learning rate in
    those of the rest; dependency_gate: whether G is trained (DSpark's head has none).

    Raises:
        HyperDFlashConfigError: a field is of another type or out of range, or the length is not
            given once.
    """

    objective: Objective = msgspec.field(default_factory=Objective)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise HyperDFlashConfigError("a recipe needs steps or minutes, and not both.")
        values = {name: getattr(self, name) for name in _Fields.__struct_fields__}
        checked(values, _Fields, lambda keys: ".".join(["recipe", *map(str, keys)]))


class Stage(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[stage]]``: its data, its length in epochs (or as a recipe's), and its recipe."""

    data: Annotated[tuple[Text, ...], Meta(min_length=1)]
    epochs: Positive | None = None

    def resolve(self, samples: int, objective: Objective) -> Recipe:
        """The recipe for so many samples."""
        values = {name: getattr(self, name) for name in _Fields.__struct_fields__}
        if self.epochs is not None:
            values["steps"] = max(1, math.ceil(self.epochs * samples / self.batch))
        return Recipe(**values, objective=objective)

    def settings(self) -> dict[str, Any]:
        """What must not change between two runs of this stage, its data aside."""
        given = msgspec.to_builtins(self)
        return {name: given[name] for name in given if name not in (*LENGTHS, "data")}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Text
    draft: Text
    out: Text
    stage: Annotated[tuple[Stage, ...], Meta(min_length=1)]
    max_length: Count = 2048
    features: Literal["cache", "online", "captured"] = "cache"
    held_out: dict[str, Text] = msgspec.field(default_factory=dict)
    objective: Objective = msgspec.field(default_factory=Objective)


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A checked training file; relative paths count from its folder."""

    target: str
    draft: Path
    out: Path
    max_length: int
    features: str
    held_out: dict[str, Path | str]
    objective: Objective
    stages: tuple[Stage, ...]
    base: Path

    def data(self, stage: Stage) -> tuple[Path | str, ...]:
        """A stage's files, folders or hub names."""
        return tuple(data_place(self.base, name) for name in stage.data)


def _named(path: Path, keys: Keys) -> str:
    """The place of a value of the file, in words."""
    words = [str(path)]
    if keys[:1] == ("stage",) and len(keys) > 1:
        words.append(f"stage {int(keys[1]) + 1}")
        keys = keys[2:]
    elif len(keys) > 1:
        words.append(f"[{keys[0]}]")
        keys = keys[1:]
    elif keys in (("objective",), ("held_out",)):
        words.append(f"[{keys[0]}]")
        keys = ()
    name = ".".join(str(k) for k in keys if isinstance(k, str))
    return ": ".join([*words, name] if name else words)


def read_schedule(path: Path) -> Schedule:
    """Read and check a training file.

    Raises:
        FileNotFoundError: no such file. HyperDFlashConfigError: not TOML, or a field is missing,
            unknown, of another type or out of range.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--config {path} does not exist.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HyperDFlashConfigError(f"{path} is not TOML: {error}.") from error
    file = checked(raw, _File, lambda keys: _named(path, keys))
    for number, stage in enumerate(file.stage, 1):
        lengths = [name for name in LENGTHS[:3] if getattr(stage, name) is not None]
        if len(lengths) != 1:
            raise HyperDFlashConfigError(
                f"{path}: stage {number} needs exactly one of epochs, steps or minutes; found "
                f"{' and '.join(lengths) or 'none'}."
            )
        if file.features == "captured" and len(stage.data) != 1:
            raise HyperDFlashConfigError(
                f"{path}: stage {number}: data must be one folder of `hyperdflash capture` with "
                f"features = captured, found {len(stage.data)}."
            )
    base = path.resolve().parent
    return Schedule(
        target=str(base / file.target) if (base / file.target).is_dir() else file.target,
        draft=Path(os.path.normpath(base / file.draft)),
        out=Path(os.path.normpath(base / file.out)),
        max_length=file.max_length,
        features=file.features,
        held_out={kind: data_place(base, place) for kind, place in file.held_out.items()},
        objective=file.objective,
        stages=file.stage,
        base=base,
    )
