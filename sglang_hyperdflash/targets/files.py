"""The parts of a target checkpoint that a drafter needs, without loading it: config and gate.

A target is a folder or a hub id. Tensors are read by byte range through the safetensors index, so
of a 160 GB checkpoint about 300 KB are read, and a shard without the gate is never opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.kinds import TargetKind, target_kind, text_fields
from sglang_hyperdflash.targets.weight_names import core_name
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What SGLang's --dtype and a config.json call them, besides auto.
DTYPE_NAMES = {name: name for name in ("float32", "float16", "bfloat16")}
DTYPE_NAMES |= {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class TargetFacts:
    """The fields of a target's ``config.json`` that determine its drafter's shape."""

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
        """Read a ``config.json``; raise ``HyperDFlashConfigError`` naming the missing fields.

        Fields of a multimodal target are read in its ``text_config``.
        """
        kind = target_kind(config)
        fields = text_fields(config)
        fields.setdefault("hc_mult", fields.get(kind.paths_field))
        if kind.gate_start == "fc":
            # Only a gate has an epsilon; such a target has none.
            fields.setdefault("hc_eps", 0.0)
        names = [name for name in cls.__dataclass_fields__ if name != "architecture"]
        missing = [name for name in names if fields.get(name) is None]
        if missing:
            hint = (
                "HYPERDFLASH needs a target with hyper-connection residual streams "
                f"({kind.paths_field})."
                if "hc_mult" in missing
                else "Add the fields to the target's config.json."
            )
            raise HyperDFlashConfigError(
                f"the target's config.json lacks {', '.join(missing)}. {hint}"
            )
        return cls(config["architectures"][0], *(fields[name] for name in names))


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
            raise FileNotFoundError(
                f"target {self.name} has no {file}; expected a target checkpoint with its "
                "config.json and safetensors. Pass that folder, or a hub id (owner/name)."
            ) from error
        except OSError as error:
            raise FileNotFoundError(
                f"target {self.name} is not a local folder, and its {file} cannot be read from "
                f"the hub: {error}"
            ) from error

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._json("config.json")

    def _json(self, name: str) -> dict[str, Any]:
        with self._open(name) as file:
            content = file.read()
        try:
            found = json.loads(content)
        except ValueError as error:
            raise HyperDFlashConfigError(
                f"target {self.name}: its {name} is not JSON ({error}). Download it again."
            ) from error
        if not isinstance(found, dict):
            raise HyperDFlashConfigError(
                f"target {self.name}: its {name} must hold a JSON object. Download it again."
            )
        return found

    def config(self) -> dict[str, Any]:
        """The target's ``config.json``."""
        return self._config

    @property
    def kind(self) -> TargetKind:
        """The target's entry in the table; raises as :func:`target_kind` does."""
        return target_kind(self._config)

    def index(self) -> dict[str, Any] | None:
        """The ``model.safetensors.index.json``; None without one.

        Raises:
            HyperDFlashConfigError: it is damaged.
        """
        name = "model.safetensors.index.json"
        return self._json(name) if self.filesystem.exists(f"{self.root}/{name}") else None

    def _tensor_files(self) -> dict[str, str]:
        """File of every tensor, from the index, or from the one file's own header."""
        index = self.index()
        if index is not None:
            if not isinstance(index.get("weight_map"), dict):
                raise HyperDFlashConfigError(
                    f"target {self.name}: its model.safetensors.index.json has no weight_map. "
                    "Download it again."
                )
            return index["weight_map"]
        with self._open("model.safetensors") as file:
            return dict.fromkeys(read_header(file, "model.safetensors")[0], "model.safetensors")

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """Checkpoint name and file of every tensor, by its name in the core's scheme."""
        return {_plain(name): (name, file) for name, file in self._tensor_files().items()}

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

    def hc_head(self, m: int, d: int) -> HcHead | None:
        """``fn [m, m*d], base [m], scale [1]`` in fp32, or None for a target without them.

        In any spelling of the target's kind; an MTP layer's ``hc_head`` is another one, and so are
        tensors of that name in a target that does not collapse with them.

        Raises:
            HyperDFlashConfigError: only some of the three are there, or a shape differs.
        """
        if self.kind.gate_start != "exact":
            return None
        return self._gate(self.kind.tensors, ((m, m * d), (m,), (1,)))

    def lagged_gate(self, m: int, d: int, layers: int) -> HcHead:
        """The last layer's ``hc_ffn`` gate: ``fn [m, m*d], base [m], scale [1]`` in fp32.

        The target gates with the same formula, but on the residual before that layer's FFN: as a
        start for a gate of the final residual it is approximate (SGLang's
        ``models/deepseek_v4_mhc.py``: ``pre`` is the first of a connection's three parts).

        Raises:
            HyperDFlashConfigError: a tensor is missing or a shape differs.
        """
        spellings = tuple(
            tuple(name.format(last=layers - 1) for name in names) for names in self.kind.tensors
        )
        size = (2 + m) * m
        gate = self._gate(spellings, ((size, m * d), (size,), (3,)))
        if gate is None:
            raise HyperDFlashConfigError(
                f"target {self.name} ({self.kind.name}) has no tensor {spellings[0][0]}, whose "
                "gate --gate approximate starts from. Use --reducer fc."
            )
        fn, base, scale = gate
        return HcHead(fn[:m].clone(), base[:m].clone(), scale[:1].clone())

    def _gate(
        self, spellings: tuple[tuple[str, ...], ...], shapes: tuple[tuple[int, ...], ...]
    ) -> HcHead | None:
        """The three tensors, each by its first present spelling; None without any."""
        plain = [[_plain(name) for name in names] for names in spellings]
        found = [next((n for n in names if n in self._places), None) for names in plain]
        if not any(found):
            return None
        missing = [names[0] for names, name in zip(spellings, found, strict=True) if name is None]
        if missing:
            raise HyperDFlashConfigError(
                f"target {self.name} holds {', '.join(name for name in found if name)} but not "
                f"{', '.join(missing)}; its checkpoint is incomplete."
            )
        return HcHead(
            *(self._shaped(name, shape) for name, shape in zip(found, shapes, strict=True))
        )

    def _shaped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.tensor(name)
        if tuple(tensor.shape) != shape:
            facts = TargetFacts.from_config(self._config)
            raise HyperDFlashConfigError(
                f"target {self.name}: tensor {self._places[name][0]} has shape "
                f"{tuple(tensor.shape)}; its config.json (hc_mult {facts.hc_mult}, hidden_size "
                f"{facts.hidden_size}) asks for {shape}."
            )
        return tensor


def _plain(name: str) -> str:
    """A checkpoint name of any target without prefixes, in the core's scheme."""
    return core_name(name.replace("language_model.", ""))


def read_header(file, name: str) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensor table and where its data begin.

    Raises:
        HyperDFlashConfigError: it has no such header; ``name`` says which file.
    """
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if 0 < length < 100 << 20 else b""
    try:
        table = json.loads(text)
    except ValueError as error:
        raise HyperDFlashConfigError(f"{name} is not a safetensors file: {error}.") from error
    if not isinstance(table, dict):
        raise HyperDFlashConfigError(
            f"{name} is not a safetensors file: its header is not a table."
        )
    table.pop("__metadata__", None)
    return table, 8 + length


def read_tensor(file, name: str, where: str) -> torch.Tensor:
    """One tensor of an open safetensors file, reading its bytes only.

    Raises:
        HyperDFlashConfigError: it is not there, cut short, or not of a plain float dtype.
    """
    file.seek(0)
    table, start = read_header(file, where)
    if name not in table:
        raise HyperDFlashConfigError(f"{where} has no tensor {name}, though the index says so.")
    entry = table[name]
    if entry["dtype"] not in DTYPES:
        raise HyperDFlashConfigError(
            f"{where}: tensor {name} is {entry['dtype']}; expected one of {', '.join(DTYPES)}."
        )
    begin, end = entry["data_offsets"]
    file.seek(start + begin)
    data = bytearray(file.read(end - begin))
    if len(data) != end - begin:
        raise HyperDFlashConfigError(f"{where} is cut short inside tensor {name}.")
    return torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).view(entry["shape"]).clone()


def model_dtype(asked: str, config: Mapping[str, Any]) -> str:
    """What SGLang's ``--dtype`` makes of a target: ``float32``, ``float16`` or ``bfloat16``.

    Args:
        asked: the option, ``auto`` included. config: the target's ``config.json``, for ``auto``
            (SGLang's ``configs/model_config.py``, ``_get_and_verify_dtype``).

    Raises:
        HyperDFlashConfigError: SGLang has no such type.
    """
    if asked != "auto":
        if asked.lower() not in DTYPE_NAMES:
            raise HyperDFlashConfigError(
                f"--dtype must be one of auto, {', '.join(DTYPE_NAMES)}; found {asked}."
            )
        return DTYPE_NAMES[asked.lower()]
    fields = text_fields(config)
    stored = str(fields.get("dtype") or fields.get("torch_dtype")).removeprefix("torch.")
    found = DTYPE_NAMES.get(stored, "float32")
    if found == "float32":
        return "bfloat16" if str(fields.get("model_type", "")).startswith("gemma") else "float16"
    return found


def load_tokenizer(
    name: str, revision: str | None = None, *, advice: str = "Add its tokenizer files."
) -> Any:
    """The target's transformers tokenizer.

    Args:
        name: folder or hub id. advice: what to do without one, for the error.

    Raises:
        HyperDFlashConfigError: transformers finds no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise HyperDFlashConfigError(
            f"target {name} has no tokenizer that can be read ({str(error).splitlines()[0]}). "
            f"{advice}"
        ) from error


def mask_token_of(name: str, revision: str | None = None) -> int | None:
    """Id of the target tokenizer's mask token, or None, in which case --mask-token-id is needed.

    Raises:
        HyperDFlashConfigError: transformers finds no tokenizer.
    """
    advice = "Add its tokenizer files, or pass --mask-token-id."
    return load_tokenizer(name, revision, advice=advice).mask_token_id
