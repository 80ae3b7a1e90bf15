"""What a writer without an end keeps of its shards: the newest, and a sample of all before."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hyperdflash.training.store.manifest import Shard


def surplus(shards: Sequence[Shard], budget: int, reservoir: float) -> list[Shard]:
    """The shards to remove, oldest first, so that at most ``budget`` bytes stay.

    The newest fill ``1 - reservoir`` of the budget. Of those that are older, the lowest checksums
    fill the rest: a uniform sample of all that was ever written, since a checksum is as good as a
    random number and never changes.

    Args:
        shards: oldest first.
    """
    newest = _fitting(list(reversed(shards)), budget * (1 - reservoir))
    older = shards[: len(shards) - len(newest)]
    sample = _fitting(sorted(older, key=lambda shard: shard.sha256), budget * reservoir)
    kept = {shard.file for shard in sample}
    return [shard for shard in older if shard.file not in kept]


def _fitting(shards: Sequence[Shard], room: float) -> list[Shard]:
    """The first ones that fit."""
    found = []
    for shard in shards:
        room -= shard.size
        if room < 0:
            break
        found.append(shard)
    return found
