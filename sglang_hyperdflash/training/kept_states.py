"""The target's states of samples in one file, for all runs that train on the same samples.

Drafters of one target are trained on the same states, and a resumed run needs them again. The
file holds bf16 rows ``[tokens, (m + 1 + n) * d]`` (residual, final state, chosen layers),
mapped into memory and shared by processes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.atomic import replacing
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import InUse, lock
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample, States, computed, pad_states

KIND = "hyperdflash train (states)"
DTYPE = torch.bfloat16
# States of another target differ completely; other kernels or threads change the last bits.
TOLERANCE = 0.05


class KeptStates:
    """States of samples from their file; as ``FeatureCache``, without computing them.

    Args:
        path: the file. widths: columns of residual, final state and layers.
    """

    def __init__(self, path: Path, samples: list[Sample], widths: tuple[int, ...]) -> None:
        self.samples, self.widths = samples, widths
        self._rows = rows_of(path, samples, sum(widths), shared=False)

    def states(self, indices: list[int]) -> States:
        """See :class:`~sglang_hyperdflash.training.samples.Source`."""
        columns = zip(*(self._rows[i].split(self.widths, -1) for i in indices), strict=True)
        return States(*(pad_states(list(parts)) for parts in columns))


def rows_of(
    path: Path, samples: list[Sample], width: int, *, shared: bool
) -> tuple[torch.Tensor, ...]:
    """Each sample's ``[tokens, width]`` of a file; writing to ``shared`` ones writes to it."""
    lengths = [len(sample.tokens) for sample in samples]
    size = sum(lengths) * width
    flat = torch.from_file(str(path), shared=shared, size=size, dtype=DTYPE)
    return flat.view(-1, width).split(lengths)


def kept_states(
    folder: Path,
    target: Any,
    samples: list[Sample],
    layer_ids: tuple[int, ...],
    world: ProcessGroup,
) -> KeptStates:
    """The states of samples from ``folder``, computed first where they are missing.

    Raises:
        HyperDFlashConfigError: the folder holds states of another target.
        WriteFailed: the disk is full, or the folder cannot be written.
    """
    name = short_hash({"tokens": [s.tokens for s in samples], "layers": list(layer_ids)})
    path = folder / f"{name}.states"
    shortest = min(range(len(samples)), key=lambda i: len(samples[i].tokens))
    _, *fresh = next(computed(target, [samples[shortest]], 1, layer_ids))
    widths = tuple(part.shape[-1] for part in fresh)
    world.on_main(lambda: write_once(path, target, samples, layer_ids, sum(widths)))
    found = KeptStates(path, samples, widths)
    _check_target(path, found.states([shortest]), fresh)
    return found


def write_once(
    path: Path, target: Any, samples: list[Sample], layer_ids: tuple[int, ...], width: int
) -> None:
    """Compute the states of ``samples`` into a new file, atomically.

    Waits for another run that computes them already: both would write to one partial file.
    """
    while not path.is_file():
        try:
            with lock(path.parent, KIND):
                if not path.is_file():
                    write(path, target, samples, layer_ids, width)
        except InUse:
            time.sleep(1)


def write(
    path: Path, target: Any, samples: list[Sample], layer_ids: tuple[int, ...], width: int
) -> None:
    """Compute the states of ``samples`` into ``path``."""
    with replacing(path, (OSError, RuntimeError)) as partial:
        rows = rows_of(partial, samples, width, shared=True)
        for i, *parts in computed(target, samples, 32, layer_ids):
            torch.cat(parts, -1, out=rows[i])


def _check_target(path: Path, kept: States, fresh: list[torch.Tensor]) -> None:
    for name, values in zip(("residual", "final", "layers"), fresh, strict=True):
        found = getattr(kept, name)[0]
        error = (found - values.float()).norm() / values.float().norm().clamp_min(1e-9)
        if not error < TOLERANCE:
            raise HyperDFlashConfigError(
                f"{path} holds states of another target: expected the {name} states of this one, "
                f"found states that differ by {error:.0%}. Pass another --states, or remove it."
            )
