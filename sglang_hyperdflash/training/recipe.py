"""The training file: its fields, their checks, and the schedule of stages that it becomes.

``docs/reference/training_file.md`` is made from the fields and their descriptions.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import CLOSED, checked
from sglang_hyperdflash.training.rows import HUB

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
# A run may be made longer and go on; all else of a stage must stay.
LENGTHS = ("steps", "minutes", "epochs")
MAY_CHANGE = (*LENGTHS, "every", "keep")


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class Objective:
    """What a drafter learns; the predecessor of each draft is the data's own token.

    ``ce_kl`` is the paper's eq. 2-3, ``acceptance`` DSpark's form, ``selector`` DFlash 2's. p is
    the target's own distribution; the paper teaches with the mean of the paths instead, which
    served alike (tau 2.60 against 2.61 over three trainings each).
    ``candidates`` is needed because a server's candidates are the likeliest tokens of the draft
    row's own logits u: a head trained from the start on ``s`` alone carries the drafts by itself,
    and the right token is seldom among the candidates.
    """

    loss: Annotated[
        Literal["ce_kl", "acceptance", "selector"] | None,
        Field(
            description="ce_kl: CE + alpha * T^2 / P * sum of KL(p_k || q_k) over k <= P; "
            "acceptance: (1 - mix) * CE + mix * sum of |p - q| over all drafts; selector: CE and a "
            "K-way CE over the candidates; none: acceptance with a dependency head, else ce_kl"
        ),
    ] = None
    mix: Annotated[float, Field(ge=0, le=1, description="weight of the distance")] = 0.9
    alpha: Annotated[float, Field(ge=0, description="weight of the KL term; 0 turns it off")] = 0.15
    T: Annotated[Positive, Field(description="temperature of both distributions of the KL")] = 1.0
    P: Annotated[Count, Field(description="drafted positions in the KL, from the first")] = 2
    gamma: Annotated[
        Positive,
        Field(description="decay of the position weights exp(-(k-1) / gamma) of CE and distance"),
    ] = 4.0
    candidates: Annotated[
        float,
        Field(
            ge=0,
            description="weight of the CE of the draft rows' own logits, which choose the "
            "candidates of a dependency head; unused by selector, whose CE is that already",
        ),
    ] = 0.3
    chunk: Annotated[
        Count, Field(description="rows of logits in memory at once; changes nothing else")
    ] = 2048

    def resolved(self, config: HyperDFlashConfig) -> Objective:
        """The objective of a drafter: its loss named, ``candidates`` 0 where it does not apply.

        Raises:
            HyperDFlashConfigError: the loss needs a dependency head that the drafter lacks.
        """
        loss = self.loss or ("acceptance" if config.dependency else "ce_kl")
        if loss == "selector" and config.dependency is None:
            raise HyperDFlashConfigError(
                "[objective]: loss = selector needs a drafter with a dependency head. Make one "
                "with `hyperdflash init --dependency-rank R`, or choose another loss."
            )
        chosen = config.dependency is not None and loss != "selector"
        return dataclasses.replace(self, loss=loss, candidates=self.candidates if chosen else 0.0)

    @property
    def term(self) -> str:
        """The second term's name in ``losses.TERMS`` and logs."""
        return {"ce_kl": "kl", "acceptance": "tv", "selector": "selector"}[self.loss]

    @property
    def factors(self) -> tuple[float, float, float]:
        """Of the CE, of the second term, and of the CE of u alone."""
        second = {"ce_kl": self.alpha, "acceptance": self.mix, "selector": 0.0}[self.loss]
        return 1.0 - self.mix if self.loss == "acceptance" else 1.0, second, self.candidates

    @property
    def taught(self) -> int | None:
        """Drafts of a block that the target teaches, from the first; None for all."""
        return {"ce_kl": self.P if self.alpha else 0, "acceptance": None, "selector": 0}[self.loss]


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class _Fields:
    """What a stage may set, besides its data."""

    steps: Annotated[Count | None, Field(description="length in optimizer steps")] = None
    minutes: Annotated[Positive | None, Field(description="length in minutes of training")] = None
    lr: Annotated[Positive, Field(description="highest learning rate of AdamW")] = 2e-3
    lr_floor: Annotated[AtLeast0, Field(description="where the cosine decay ends")] = 2e-5
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up")] = 50
    weight_decay: Annotated[AtLeast0, Field(description="of matrices; not of gate or norms")] = 0.0
    clip: Annotated[Positive, Field(description="largest norm of the gradient")] = 1.0
    batch: Annotated[Count, Field(description="samples of a step, over all processes")] = 8
    micro_batch: Annotated[Count, Field(description="samples in memory at once, per process")] = 8
    anchors: Annotated[Count, Field(description="blocks per sample, drawn at random")] = 32
    every: Annotated[Count, Field(description="steps between checkpoints")] = 400
    keep: Annotated[Count, Field(description="checkpoints kept, the last ones")] = 2
    bf16: Annotated[bool, Field(description="autocast of the drafter's forward pass")] = True
    compile: Annotated[bool, Field(description="torch.compile of the drafter's layers")] = False
    seed: Annotated[int, Field(ge=0, description="random seed of the data order")] = 0
    weights: Annotated[
        tuple[Positive, ...],
        Field(
            description="for each of data, how often an epoch takes its samples; without it, once"
        ),
    ] = ()
    dependency_lr: Annotated[
        Positive, Field(description="learning rate of a dependency head, as a factor of lr")
    ] = 0.3
    dependency_gate: Annotated[
        bool, Field(description="train the dependency head's gate G; DSpark's head has none")
    ] = True


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class Recipe(_Fields):
    """Hyperparameters of one stage; either ``steps`` or ``minutes`` is its length."""

    objective: Objective = dataclasses.field(default_factory=Objective)


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a learner draws and when that is judged.

    Attributes:
        newest: samples of which half of a batch is drawn; the other half is of all older ones.
        judges: held-out requests among the newest, and among older ones, that judge.
        passes: times that a sample may be drawn, on average; then the learner waits for new ones.
    """

    newest: int = 2000
    judges: int = 64
    passes: int = 20


def pass_samples(counts: Sequence[int], weights: Sequence[float] = ()) -> int:
    """Samples of a pass over sources of so many, each taken as often as its weight says."""
    if not weights:
        return sum(counts)
    return sum(round(count * weight) for count, weight in zip(counts, weights, strict=True))


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class Stage(_Fields):
    """One ``[[stage]]``: its data, its length in epochs (or as a recipe's), and its recipe."""

    data: Annotated[
        tuple[Text, ...],
        Field(min_length=1, description="as `capture --data`; capture folders if captured"),
    ]
    epochs: Annotated[Positive | None, Field(description="length in passes over the data")] = None

    def resolve(self, counts: Sequence[int], objective: Objective) -> Recipe:
        """The recipe for so many samples of each of ``data``.

        Raises:
            HyperDFlashConfigError: a pass takes none of them.
        """
        if not (samples := pass_samples(counts, self.weights)):
            raise HyperDFlashConfigError(
                f"a pass over {', '.join(self.data)} takes no sample: raise its weights."
            )
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Fields)}
        if self.epochs is not None:
            values["steps"] = max(1, math.ceil(self.epochs * samples / self.batch))
        return Recipe(**values, objective=objective)

    def settings(self) -> dict[str, Any]:
        """What must not change between two runs of this stage, its data aside."""
        given = dataclasses.asdict(self)
        return {name: given[name] for name in given if name not in (*MAY_CHANGE, "data")}


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class Schedule:
    """The training file; :func:`read_schedule` completes its relative paths."""

    target: Annotated[Text, Field(description="folder or hub id of the target")]
    draft: Annotated[Path, Field(description="drafter of `hyperdflash init`: folder or hub id")]
    out: Annotated[Path, Field(description="folder for the best drafter of the last stage")]
    stage: Annotated[
        tuple[Stage, ...],
        Field(min_length=1, description="stages in order; each starts from the one before's best"),
    ]
    max_length: Annotated[
        Count, Field(description="tokens; answers that end later are left out")
    ] = 2048
    features: Annotated[
        Literal["cache", "online", "captured"],
        Field(
            description="the target's states: computed once and kept, recomputed for each batch, "
            "or read from the folders of `hyperdflash capture`"
        ),
    ] = "cache"
    held_out: Annotated[
        dict[str, Text],
        Field(description="name = file (capture folder if captured); tau is the mean over these"),
    ] = dataclasses.field(default_factory=dict)
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "none"], ...],
        Field(description="where the scalars of every step go, besides the terminal"),
    ] = ("tensorboard",)
    objective: Objective = dataclasses.field(default_factory=Objective)


def _change(raw: dict[str, Any], change: str) -> None:
    """Set a field of a training file by ``NAME=VALUE``; the value is TOML, or a text.

    Raises:
        HyperDFlashConfigError: the name is none that a field may have.
    """
    name, equals, text = change.partition("=")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, field = name.split(".")
    place: Any = raw
    try:
        for key in sections:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        if not equals or not isinstance(place, dict):
            raise ValueError
    except (ValueError, IndexError, AttributeError) as error:
        raise HyperDFlashConfigError(
            f"--set {change}: expected NAME=VALUE, NAME as in objective.mix=0.5 or stage.0.lr=1e-4 "
            "with a number of a stage in the file, from 0."
        ) from error
    if field in LENGTHS:  # a stage has one length
        for other in LENGTHS:
            place.pop(other, None)
    place[field] = value


def read_schedule(path: Path, changes: Sequence[str] = ()) -> Schedule:
    """Read and check a training file.

    Args:
        changes: fields that are set afterwards, ``NAME=VALUE``.

    Raises:
        FileNotFoundError: no such file. HyperDFlashConfigError: not TOML, or a field is missing,
            unknown, of another type or out of range.
    """
    from sglang_hyperdflash.targets.files import is_hub_id  # late: it imports torch

    if not path.is_file():
        raise FileNotFoundError(f"--config {path} does not exist.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HyperDFlashConfigError(f"{path} is not TOML: {error}.") from error
    for change in changes:
        _change(raw, change)
    file = checked(raw, Schedule, str(path))
    for number, stage in enumerate(file.stage, 1):
        lengths = [name for name in LENGTHS if getattr(stage, name) is not None]
        if len(lengths) != 1:
            raise HyperDFlashConfigError(
                f"{path}: stage {number} needs exactly one of epochs, steps or minutes; found "
                f"{' and '.join(lengths) or 'none'}."
            )
        wanted = len(stage.data) if file.features == "captured" else 0
        if stage.weights and len(stage.weights) != wanted:
            raise HyperDFlashConfigError(
                f"{path}: stage {number}: expected {wanted} weights, one for each capture folder "
                f"in data, found {len(stage.weights)}."
            )
    base, draft = path.resolve().parent, str(file.draft)

    def placed(name: str) -> str:
        return name if name.startswith(HUB) else os.path.normpath(base / name)

    return dataclasses.replace(
        file,
        target=placed(file.target) if (base / file.target).is_dir() else file.target,
        draft=Path(draft if is_hub_id(draft) and not (base / draft).is_dir() else placed(draft)),
        out=Path(placed(str(file.out))),
        held_out={name: placed(place) for name, place in file.held_out.items()},
        stage=tuple(
            dataclasses.replace(stage, data=tuple(map(placed, stage.data))) for stage in file.stage
        ),
    )
