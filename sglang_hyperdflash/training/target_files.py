"""What a drafter needs of a target checkpoint, without loading it: its config and its ``hc_head``.

A target is a folder or a hub id. Tensors are read by byte range through the safetensors index, so
of a 160 GB checkpoint some 300 KB are read, and a shard that holds no ``hc_head`` is never opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.config import HyperDFlashConfigError
from sglang_hyperdflash.reference.weights import core_name

HC_HEAD = ("hc_head_fn", "hc_head_base", "hc_head_scale")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TargetFacts:
    """The fields of a target's ``config.json`` that shape its drafter."""

    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    hc_mult: int
    hc_eps: float
    rms_norm_eps: float
    max_position_embeddings: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TargetFacts:
        """Read a ``config.json``; raise ``HyperDFlashConfigError`` naming what it lacks."""
        names = [name for name in cls.__dataclass_fields__ if name != "architecture"]
        missing = [name for name in names if config.get(name) is None]
        if not config.get("architectures"):
            missing.insert(0, "architectures")
        if missing:
            hint = (
                "HYPERDFLASH needs a target with hyper-connection residual streams (hc_mult)."
                if "hc_mult" in missing
                else "Add the fields to the target's config.json."
            )
            raise HyperDFlashConfigError(
                f"the target's config.json lacks {', '.join(missing)}. {hint}"
            )
        return cls(config["architectures"][0], *(config[name] for name in names))


class TargetFiles:
    """A target checkpoint's files; ``name`` is a folder or a hub id (``owner/name``).

    Args:
        revision: branch, tag or commit of a hub id.

    Raises:
        FileNotFoundError: neither a folder nor readable on the hub.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name = name
        folder = Path(name)
        if folder.is_dir():
            import fsspec

            self.filesystem, self.root = fsspec.filesystem("file"), str(folder.resolve())
            return
        if name.count("/") != 1 or folder.is_absolute() or name.startswith("."):
            raise FileNotFoundError(f"target {name} is neither a folder nor a hub id (owner/name).")
        from huggingface_hub import HfFileSystem

        self.filesystem = HfFileSystem()
        self.root = name if revision is None else f"{name}@{revision}"

    def _open(self, file: str):
        try:
            return self.filesystem.open(f"{self.root}/{file}", "rb")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"target {self.name} has no {file}.") from error
        except OSError as error:
            raise FileNotFoundError(
                f"target {self.name} is no folder here and its {file} cannot be read from the hub: "
                f"{error}"
            ) from error

    def config(self) -> dict[str, Any]:
        """The target's ``config.json``."""
        with self._open("config.json") as file:
            return json.load(file)

    def _tensor_files(self) -> dict[str, str]:
        """File of every tensor, from the index, or from the one file's own header."""
        if self.filesystem.exists(f"{self.root}/model.safetensors.index.json"):
            with self._open("model.safetensors.index.json") as file:
                return json.load(file)["weight_map"]
        with self._open("model.safetensors") as file:
            return dict.fromkeys(_header(file, "model.safetensors")[0], "model.safetensors")

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """Checkpoint name and file of every tensor, by its name in the core's scheme."""
        return {core_name(name): (name, file) for name, file in self._tensor_files().items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in fp32, by its name in the core's scheme (``norm``, ``hc_head_fn``).

        Raises:
            HyperDFlashConfigError: the checkpoint has no such tensor.
        """
        if name not in self._places:
            raise HyperDFlashConfigError(f"target {self.name} has no tensor for {name}.")
        source, file = self._places[name]
        with self._open(file) as handle:
            return read_tensor(handle, source, file).float()

    def hc_head(self, m: int, d: int) -> tuple[torch.Tensor, ...] | None:
        """``fn [m, m*d], base [m], scale [1]`` in fp32, or None for a target without them.

        Names in transformers' or DeepSeek's own scheme; an MTP layer's ``hc_head`` is another one.

        Raises:
            HyperDFlashConfigError: only some of the three are there, or a shape differs.
        """
        found = [name for name in HC_HEAD if name in self._places]
        if not found:
            return None
        if len(found) != len(HC_HEAD):
            raise HyperDFlashConfigError(
                f"target {self.name} holds {', '.join(found)} but not "
                f"{', '.join(sorted(set(HC_HEAD) - set(found)))}; its checkpoint is incomplete."
            )
        shapes = {"hc_head_fn": (m, m * d), "hc_head_base": (m,), "hc_head_scale": (1,)}
        tensors = []
        for name in HC_HEAD:
            source, tensor = self._places[name][0], self.tensor(name)
            if tuple(tensor.shape) != shapes[name]:
                raise HyperDFlashConfigError(
                    f"target {self.name}: tensor {source} has shape {tuple(tensor.shape)}; its "
                    f"config.json (hc_mult {m}, hidden_size {d}) asks for {shapes[name]}."
                )
            tensors.append(tensor)
        return tuple(tensors)


def _header(file, name: str) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensor table and where its data begin."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if 0 < length < 100 << 20 else b""
    try:
        table = json.loads(text)
    except ValueError as error:
        raise HyperDFlashConfigError(f"{name} is not a safetensors file: {error}.") from error
    table.pop("__metadata__", None)
    return table, 8 + length


def read_tensor(file, name: str, where: str) -> torch.Tensor:
    """One tensor of an open safetensors file, reading its bytes only.

    Raises:
        HyperDFlashConfigError: it is not there, cut short, or of a dtype that is no plain float.
    """
    file.seek(0)
    table, start = _header(file, where)
    if name not in table:
        raise HyperDFlashConfigError(f"{where} has no tensor {name}, though the index says so.")
    entry = table[name]
    if entry["dtype"] not in _DTYPES:
        raise HyperDFlashConfigError(
            f"{where}: tensor {name} is {entry['dtype']}; expected one of {', '.join(_DTYPES)}."
        )
    begin, end = entry["data_offsets"]
    file.seek(start + begin)
    data = bytearray(file.read(end - begin))
    if len(data) != end - begin:
        raise HyperDFlashConfigError(f"{where} is cut short inside tensor {name}.")
    return torch.frombuffer(data, dtype=_DTYPES[entry["dtype"]]).view(entry["shape"]).clone()


def mask_token_of(name: str, revision: str | None = None) -> int | None:
    """Id of the target tokenizer's mask token, or None: then it must be given."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision).mask_token_id
