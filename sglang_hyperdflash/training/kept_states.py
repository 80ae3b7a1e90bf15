"""The target's states of samples in one file, for all runs that train on the same samples.

A run that compares drafters of one target computes the same states again and again; one that is cut
computes them anew when it resumes. The file holds rows ``[tokens, (m + 1 + n) * d]`` of bf16 as
they are (residual, final state, chosen layers), mapped into memory: processes share its pages.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.atomic import replacing
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample, States, computed, pad_states

DTYPE = torch.bfloat16
# States of another target differ by their own size; other kernels or threads change last bits.
TOLERANCE = 0.05


class KeptStates:
    """States of samples from their file; as ``FeatureCache``, without computing them.

    Args:
        path: the file. widths: columns of residual, final state and layers.
    """

    def __init__(self, path: Path, samples: list[Sample], widths: tuple[int, int, int]) -> None:
        self.samples, self.widths = samples, widths
        self._ends = list(accumulate(len(sample.tokens) for sample in samples))
        self._rows = mapped(path, self._ends[-1] if samples else 0, sum(widths), False)

    def states(self, indices: list[int]) -> States:
        """See :class:`~sglang_hyperdflash.training.samples.Source`."""
        rows = [
            self._rows[self._ends[i] - len(self.samples[i].tokens) : self._ends[i]] for i in indices
        ]
        columns = zip(*(row.split(self.widths, -1) for row in rows), strict=True)
        return States(*(pad_states(list(parts)) for parts in columns))


def mapped(path: Path, tokens: int, width: int, shared: bool) -> torch.Tensor:
    """A file's ``[tokens, width]``; what is written to a ``shared`` one is written to the file."""
    if not tokens:
        return torch.empty(0, width, dtype=DTYPE)
    flat = torch.from_file(str(path), shared=shared, size=tokens * width, dtype=DTYPE)
    return flat.view(tokens, width)


def kept_states(
    folder: Path,
    target: Any,
    samples: list[Sample],
    layer_ids: tuple[int, ...],
    world: ProcessGroup,
) -> KeptStates:
    """The states of samples from ``folder``, computed and put there first where they are not.

    Raises:
        HyperDFlashConfigError: the folder holds states of another target.
        WriteFailed: the disk is full, or the folder cannot be written.
    """
    name = short_hash({"tokens": [s.tokens for s in samples], "layers": list(layer_ids)})
    path = folder / f"{name}.states"
    shortest = min(samples, key=lambda sample: len(sample.tokens), default=None)
    if shortest is None:
        return KeptStates(path, samples, (0, 0, 0))
    _, *fresh = next(computed(target, [shortest], 1, layer_ids))
    widths = tuple(part.shape[-1] for part in fresh)
    world.on_main(lambda: path.is_file() or write(path, target, samples, layer_ids, sum(widths)))
    found = KeptStates(path, samples, widths)
    _check_target(path, found.states([samples.index(shortest)]), fresh)
    return found


def write(
    path: Path, target: Any, samples: list[Sample], layer_ids: tuple[int, ...], width: int
) -> None:
    """Compute the states of ``samples`` into a new file, whole or not at all."""
    ends = list(accumulate(len(sample.tokens) for sample in samples))
    with replacing(path, (OSError, RuntimeError)) as partial:
        rows = mapped(partial, ends[-1], width, True)
        for i, *parts in computed(target, samples, 32, layer_ids):
            torch.cat(parts, -1, out=rows[ends[i] - len(samples[i].tokens) : ends[i]])


def _check_target(path: Path, kept: States, fresh: list[torch.Tensor]) -> None:
    for name, values in zip(("residual", "final", "layers"), fresh, strict=True):
        found = getattr(kept, name)[0]
        error = (found - values.float()).norm() / values.float().norm().clamp_min(1e-9)
        if not error < TOLERANCE:
            raise HyperDFlashConfigError(
                f"{path} holds states of another target: expected the {name} states of this one, "
                f"found some that differ by {error:.0%}. Give another --states, or remove the file."
            )
