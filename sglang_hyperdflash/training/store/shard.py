"""A shard: a safetensors file with the rows of its samples, one sample after another.

``tokens [T]`` int32 come first, then ``residual [T, m, d]`` and, where layers were chosen,
``layers [T, n, d]``. Rows in float8_e4m3fn come after their fp32 scales, one for each token and
path, or layer: ``residual_scale [T, m]`` and ``layers_scale [T, n]``.

It is written in one pass with its checksum, and rows are read into memory of the caller's choice
(pinned, padded). safetensors' own functions copy every tensor twice on either way.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from sglang_hyperdflash.tools.atomic import replacing
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.store.manifest import REPEAT

FP8, SCALE = torch.float8_e4m3fn, "_scale"
CODES = {
    **{torch.int32: "I32", FP8: "F8_E4M3"},
    **{torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"},
}


def _raw(rows: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(rows.reshape(-1).view(torch.uint8).numpy())


def is_finite(rows: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite; 30 times as fast as ``rows.isfinite().all()``."""
    return not rows.numel() or all(bool(end.isfinite()) for end in rows.aminmax())


def to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows [S, n, d]`` in float8_e4m3fn, and their fp32 scales ``[S, n]``.

    A row's largest number becomes fp8's largest, 448. Every number down to 1/28,672 of it is
    rounded by at most 1/16 of itself.
    """
    rows = rows.float()
    scales = rows.abs().amax(-1) / torch.finfo(FP8).max
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)  # rows of zeros
    return (rows / scales.unsqueeze(-1)).to(FP8), scales


def write_shard(path: Path, tensors: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """Write a shard, whole or not at all.

    Args:
        tensors: by name, tokens first; each as the rows of every sample, ``[S, ...]`` on the CPU.

    Returns:
        The SHA-256 of the file, in hex.

    Raises:
        WriteFailed: the disk is full or cannot be written.
    """
    header, at = {}, 0
    for name, parts in tensors.items():
        shape = [sum(map(len, parts)), *parts[0].shape[1:]]
        size = sum(rows.nbytes for rows in parts)
        kind = CODES[parts[0].dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for parts in tensors.values():
            for rows in parts:
                yield _raw(rows)

    with replacing(path) as partial, partial.open("wb") as file:
        for piece in pieces():
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


class OpenShard:
    """A shard to read from: its tokens mapped into memory, other rows read when asked for.

    Attributes:
        tokens: ``[T]`` int32.

    Raises:
        HyperDFlashConfigError: its header is damaged. OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        size = int.from_bytes(self._file.read(8), "little")
        size = min(size, path.stat().st_size)  # as much as is read is also reserved
        try:
            self._entries = json.loads(self._file.read(size))
            self._base = 8 + size
            begin, end = (self._base + at for at in self._entries["tokens"]["data_offsets"])
            # Tokens come first, so little is mapped. Private: torch wants memory that it may write.
            mapped = mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_COPY)
            count = (end - begin) // 4
            self.tokens = torch.frombuffer(mapped, dtype=torch.int32, offset=begin, count=count)
        except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
            raise HyperDFlashConfigError(
                f"shard {path} is corrupt: {error!r}. Remove it. {REPEAT}"
            ) from error

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out [n, width]`` with rows from ``start`` on; other threads run meanwhile.

        Rows in fp8 are multiplied by their scales.

        Raises:
            HyperDFlashConfigError: the file ends too early.
        """
        scale = self._entries.get(name + SCALE)
        if scale is None:
            return self._read(name, start, out)
        count = scale["shape"][1]
        values = torch.empty(len(out), count, out.shape[1] // count, dtype=FP8)
        scales = torch.empty(len(out), count, 1)
        self._read(name, start, values)
        self._read(name + SCALE, start, scales)
        out.view(values.shape).copy_(values).mul_(scales)

    def _read(self, name: str, start: int, out: torch.Tensor) -> None:
        view = _raw(out)
        begin, _ = self._entries[name]["data_offsets"]
        at = self._base + begin + start * (len(view) // max(len(out), 1))
        while view:
            count = os.preadv(self._file.fileno(), [view], at)
            if not count:
                raise HyperDFlashConfigError(
                    f"shard {self.path} is cut short. Remove it and run the command again that "
                    "wrote it: only this shard is repeated."
                )
            view, at = view[count:], at + count
