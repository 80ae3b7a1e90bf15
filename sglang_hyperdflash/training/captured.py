"""Target states on disk: safetensors shards with an index, written once and streamed in training.

``index.json`` names what was captured (target, data, sizes) and every shard with its SHA-256 and
its samples; shard ``i`` holds, for each of its samples ``n``, ``n.tokens [S]`` int32,
``n.residual [S, m*d]`` (pre-collapse) and ``n.final [S, d]`` (after the final norm).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_hyperdflash.tools.atomic import replacing, write_json
from sglang_hyperdflash.tools.checksum import bytes_hash, file_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.conversations import HUB
from sglang_hyperdflash.training.samples import Sample, States

INDEX = "index.json"


@dataclass(frozen=True)
class CaptureIdentity:
    """Identity of a capture: target, dtype and data; a folder never mixes two.

    A target without ``hc_head`` is identified by its final norm.
    """

    target_architecture: str
    hc_head_fingerprint: str | None
    norm_fingerprint: str
    hc_mult: int
    hidden_size: int
    dtype: str
    data_digest: str


@dataclass(frozen=True)
class Shard:
    """A file with the samples ``[start, end)``, its SHA-256 and their answers' spans."""

    file: str
    sha256: str
    start: int
    end: int
    spans: list[Any]


def data_digest(samples: list[Sample]) -> str:
    """A short hash of tokens and spans, in order."""
    return bytes_hash(json.dumps([s.tokens, s.spans]).encode() for s in samples)


def content_hash(place: str | Path) -> str:
    """16 hex digits of the hash of a file, or of a capture's index; a hub name as it is.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if str(place).startswith(HUB):
        return str(place)
    path = Path(place)
    path = path / INDEX if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"file {path} does not exist.")
    return file_hash(path)[:16]


def bytes_of(sample: Sample, m: int, d: int, itemsize: int) -> int:
    """Disk bytes of one sample's states."""
    return len(sample.tokens) * ((m + 1) * d * itemsize + 4)


def shard_ranges(
    samples: list[Sample], m: int, d: int, itemsize: int, limit: int
) -> list[tuple[int, int]]:
    """Consecutive ranges ``[start, end)`` of samples of up to ``limit`` bytes, one at least."""
    ranges, start, size = [], 0, 0
    for i, sample in enumerate(samples):
        more = bytes_of(sample, m, d, itemsize)
        if i > start and size + more > limit:
            ranges.append((start, i))
            start, size = i, 0
        size += more
    return [*ranges, (start, len(samples))] if samples else []


class CaptureWriter:
    """Adds shards to a folder, each whole or not at all; finished ranges are skipped on resume.

    A missing shard, or one whose SHA-256 differs from the index's, counts as unfinished; without a
    readable index all do.

    Attributes:
        damaged: names of shards with another SHA-256, or of the index.

    Raises:
        HyperDFlashConfigError: the folder holds a capture of something else.
    """

    def __init__(self, folder: Path, identity: CaptureIdentity) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.identity = folder, identity
        self.shards: list[Shard] = []
        self.damaged: list[str] = []
        try:
            found, shards = _read_index(folder)
        except FileNotFoundError:
            return
        except HyperDFlashConfigError:
            self.damaged.append(INDEX)
            return
        if found != identity:
            raise HyperDFlashConfigError(
                f"{folder} holds a capture of another target, dtype or data ({found}). Choose a "
                "new folder."
            )
        for shard in shards:
            path = folder / shard.file
            if path.is_file() and file_hash(path) == shard.sha256:
                self.shards.append(shard)
            elif path.is_file():
                self.damaged.append(shard.file)

    def has(self, start: int, end: int) -> bool:
        """Whether exactly this range is on disk."""
        return any((s.start, s.end) == (start, end) for s in self.shards)

    def add(self, start: int, samples: list[Sample], states: list[States]) -> None:
        """Write one shard and then the index.

        Args:
            start: position of the first sample in the data; states: ``[1, S, .]`` for each.

        Raises:
            WriteFailed: the disk is full; earlier shards are whole, nothing half-written stays.
        """
        tensors = {}
        for i, (sample, state) in enumerate(zip(samples, states, strict=True), start):
            tensors[f"{i}.tokens"] = torch.tensor(sample.tokens, dtype=torch.int32)
            tensors[f"{i}.residual"] = state.residual[0].contiguous()
            tensors[f"{i}.final"] = state.final[0].contiguous()
        name = f"states-{start:08d}.safetensors"
        with replacing(self.folder / name, (OSError, SafetensorError)) as partial:
            save_file(tensors, partial)
            digest = file_hash(partial)
        spans = [sample.spans for sample in samples]
        others = [shard for shard in self.shards if shard.file != name]
        made = Shard(name, digest, start, start + len(samples), spans)
        self.shards = sorted([*others, made], key=lambda shard: shard.start)
        content = {"identity": asdict(self.identity), "shards": list(map(asdict, self.shards))}
        write_json(self.folder / INDEX, content, indent=1)


def _read_index(folder: Path) -> tuple[CaptureIdentity, list[Shard]]:
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no capture ({INDEX} is missing).")
    try:
        index = json.loads(path.read_bytes())
        return CaptureIdentity(**index["identity"]), [Shard(**s) for s in index["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise HyperDFlashConfigError(
            f"{path} is damaged ({error!r}). Run `hyperdflash capture` again: it repeats the "
            "shards that the index does not name."
        ) from error


class CapturedFeatures:
    """A :class:`~sglang_hyperdflash.training.samples.Source` over a capture; reads on demand.

    A shard's checksum is verified when it is first opened.

    Raises:
        FileNotFoundError: no capture there. HyperDFlashConfigError: the index is damaged, a shard
            is missing or corrupt, or the capture is not finished.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.identity, shards = _read_index(self.folder)
        self._handles: dict[str, Any] = {}
        self._places: list[tuple[str, int]] = []
        self.samples: list[Sample] = []
        for shard in shards:
            for at, spans in enumerate(shard.spans, shard.start):
                tokens = self._open(shard).get_tensor(f"{at}.tokens").tolist()
                self.samples.append(Sample(tokens, tuple(map(tuple, spans))))
                self._places.append((shard.file, at))
        if data_digest(self.samples) != self.identity.data_digest:
            raise HyperDFlashConfigError(
                f"{self.folder} holds {len(self.samples)} samples, not all of the data "
                "to be captured. Run the same `hyperdflash capture` again to finish it."
            )

    def _open(self, shard: Shard):
        name = shard.file
        if name not in self._handles:
            path = self.folder / name
            if not path.is_file():
                raise HyperDFlashConfigError(
                    f"shard {path} is missing. Run `hyperdflash capture` again to repeat it."
                )
            if file_hash(path) != shard.sha256:
                raise HyperDFlashConfigError(
                    f"shard {path} is corrupt (its SHA-256 is not the index's). Run `hyperdflash "
                    "capture` again: only this shard is repeated."
                )
            self._handles[name] = safe_open(path, framework="pt")
        return self._handles[name]

    def states(self, indices: list[int]) -> States:
        """See :class:`~sglang_hyperdflash.training.samples.Source`."""

        def rows(name: str) -> torch.Tensor:
            places = [self._places[i] for i in indices]
            parts = [self._handles[file].get_tensor(f"{at}.{name}") for file, at in places]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).float()

        return States.without_layers(rows("residual"), rows("final"))
