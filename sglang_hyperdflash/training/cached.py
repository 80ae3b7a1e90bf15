"""The target's states, computed by the processes of a training, once for all runs on the samples.

Every process computes its share of the shards and reads all of them from one store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import InUse
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample, computed
from sglang_hyperdflash.training.store.manifest import Data, Identity, data_digest, settings_of
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.writer import open_writer, shard_ranges

KIND = "hyperdflash train (states)"
# Small, so that a resumed run repeats little and every process has a share.
SHARD_BYTES = 32 << 20
BATCH = 32
# States of another target differ completely; other kernels or threads change the last bits.
TOLERANCE = 0.05


def identity_of(target: LocalTarget, layer_ids: tuple[int, ...]) -> Identity:
    """Whose states a target in this process gives; they are kept in bf16."""
    return Identity(
        target_architecture=target.config.architectures[0],
        hc_head_fingerprint=target.hc_head.fingerprint(),
        norm_fingerprint=tensors_fingerprint(target.final.norm),
        hc_mult=target.config.hc_mult,
        hidden_size=target.config.hidden_size,
        dtype="bfloat16",
        layer_ids=layer_ids,
    )


def cached(
    folder: Path,
    target: LocalTarget,
    samples: Sequence[Sample],
    layer_ids: tuple[int, ...],
    world: ProcessGroup,
) -> StoreReader:
    """The states of samples from a store in ``folder``, computed first where they are missing.

    Raises:
        HyperDFlashConfigError: the store holds states of another target.
        WriteFailed: the disk is full, or the folder cannot be written.
    """
    identity = identity_of(target, layer_ids)
    data = Data(data_digest(samples), len(samples), SHARD_BYTES)
    place = folder / short_hash([settings_of(identity), vars(data)])
    fill(place, target, samples, identity, data, world)
    world.on_main(lambda: None)  # all have filled in their share
    reader = StoreReader(place)
    lost = len(samples) - len(reader.samples)
    if lost and world.is_main:
        print(f"{lost} of {len(samples)} samples have NaN or infinite states")
    if not reader.samples:
        raise HyperDFlashConfigError(
            f"{place}: the target's states are finite for no sample. Check the target's weights."
        )
    _check_target(reader, target)
    return reader


def fill(
    folder: Path,
    target: LocalTarget,
    samples: Sequence[Sample],
    identity: Identity,
    data: Data,
    world: ProcessGroup,
) -> None:
    """Add this process's share of the shards to a store, but for what is there.

    Waits for a process of another run that adds the same share: it finds the shards there then.
    """
    ranges = shard_ranges(samples, identity, data.shard_bytes)[world.rank :: world.size]
    said = False
    while True:
        try:
            with open_writer(folder, identity, f"rank-{world.rank}", KIND, {}) as writer:
                writer.begin(data)
                for start, end in writer.missing(ranges):
                    chosen = samples[start:end]
                    states: list[tuple[torch.Tensor, ...]] = [()] * len(chosen)
                    for i, *parts in computed(target, chosen, BATCH, identity.layer_ids):
                        states[i] = tuple(rows.clone() for rows in parts)
                    writer.add(start, chosen, states)
            return
        except InUse as error:
            if not said:  # the other run may stand still
                print(f"waiting for another run's states: {error}", flush=True)
            said = True
            time.sleep(1)


def _check_target(reader: StoreReader, target: LocalTarget) -> None:
    """Compare one sample's states: a target may be another one with the same gate and norm."""
    shortest = int(reader.lengths.argmin())
    layer_ids = reader.identity.layer_ids
    _, *fresh = next(computed(target, [reader.samples[shortest]], 1, layer_ids))
    kept = reader.states([shortest])
    for name, values in zip(("residual", "layers"), fresh, strict=True):
        found = getattr(kept, name)[0].float()
        error = (found - values.float()).norm() / values.float().norm().clamp_min(1e-9)
        if not error < TOLERANCE:
            raise HyperDFlashConfigError(
                f"{reader.folder} holds states of another target: expected the {name} states of "
                f"this one, found states that differ by {error:.0%}. Pass another --states, or "
                "remove it."
            )
