"""Reading a target checkpoint's config, gate and single tensors without loading the target.

A target is a folder or a hub id, whose files come from the hub's cache, also offline. Tensors are
read through the safetensors index. From a checkpoint of 160 GB that is not in the cache, only the
300 KB of a gate are read; a whole shard is downloaded only for an embedding or LM head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import constants
from huggingface_hub.errors import SafetensorsParsingError
from safetensors import SafetensorError, safe_open

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.kinds import TargetKind, target_kind, text_fields
from sglang_hyperdflash.targets.weight_names import core_name
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import json_object

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# Tensors of at least so many bytes are read from the hub's cache, not from the hub at every start.
LARGE = 16 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The names of dtypes in SGLang's --dtype and in config.json, besides auto.
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
        """Read a ``config.json``; raise ``HyperDFlashConfigError`` naming the missing fields."""
        kind = target_kind(config)
        fields = text_fields(config)
        fields.setdefault("hc_mult", fields.get(kind.paths_field))
        if kind.gate_start == "fc":
            # Only a gate has an epsilon.
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


def is_hub_id(name: str) -> bool:
    """Whether a name that is not a folder can be a hub id, ``owner/name``."""
    return name.count("/") == 1 and not name.startswith(("/", "."))


def drafter_folder(name: str | Path) -> Path:
    """Return a drafter's folder; for a hub id, the folder of its config and weights in the cache.

    Raises:
        HyperDFlashConfigError: the hub has no such drafter or cannot be reached.
    """
    if Path(name).is_dir() or not is_hub_id(str(name)):
        return Path(name)
    try:
        patterns = ["config.json", "*.safetensors"]
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=patterns))
    except OSError as error:
        raise HyperDFlashConfigError(
            f"drafter {name}: expected a folder, or the hub id of a drafter that can be read. "
            f"{str(error).splitlines()[0]}"
        ) from error


class TargetFiles:
    """The files of a target checkpoint.

    Args:
        name: a folder or a hub id (``owner/name``).
        revision: branch, tag or commit of a hub id.

    Raises:
        FileNotFoundError: ``name`` is neither a folder nor readable on the hub.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name, self.revision = name, revision
        self.is_hub = not Path(name).is_dir()
        if self.is_hub and not is_hub_id(name):
            raise FileNotFoundError(f"target {name} is neither a folder nor a hub id (owner/name).")
        if self.is_hub:  # without a network it logs twelve lines before the error, which says all
            huggingface_hub.logging.set_verbosity_error()

    def _path(self, file: str) -> Path:
        """Return the path of a file in the folder or in the hub's cache."""
        try:  # hf_hub_download locks the file: one process per node downloads, the others wait
            if self.is_hub:
                return Path(
                    huggingface_hub.hf_hub_download(self.name, file, revision=self.revision)
                )
            return (Path(self.name) / file).resolve(strict=True)
        except OSError as error:
            raise FileNotFoundError(
                f"target {self.name} has no {file} that can be read; expected a target checkpoint "
                "with its config.json and safetensors. Pass that folder, or a hub id (owner/name). "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _json(self, file: str) -> dict[str, Any]:
        content, where = self._path(file).read_bytes(), f"{file} of target {self.name}"
        return json_object(content, where, "Download it again.")

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._json("config.json")

    def config(self) -> dict[str, Any]:
        """The target's ``config.json``."""
        return self._config

    @property
    def kind(self) -> TargetKind:
        """The target's entry in ``TARGETS``; raises as :func:`target_kind` does."""
        return target_kind(self._config)

    def index(self) -> dict[str, Any] | None:
        """Return the ``model.safetensors.index.json``, or None without one.

        Raises:
            HyperDFlashConfigError: the file is damaged.
        """
        with suppress(FileNotFoundError):
            return self._json(INDEX)
        return None

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """The checkpoint name and file of every tensor, by its name in the core's scheme."""
        index = self.index()
        if index is not None:
            files = index.get("weight_map")
        else:
            with self._opened(WEIGHTS) as opened:
                files = dict.fromkeys(opened.keys(), WEIGHTS)
        if not isinstance(files, dict):
            raise HyperDFlashConfigError(
                f"target {self.name}: its {INDEX} has no weight_map. Download it again."
            )
        return {_plain(name): (name, file) for name, file in files.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor in fp32; see :meth:`stored_tensor`."""
        return self.stored_tensor(name).float()

    def stored_tensor(self, name: str) -> torch.Tensor:
        """Read one tensor as it is stored, by its name in the core's scheme (``norm``,
        ``hc_head_fn``).

        Raises:
            HyperDFlashConfigError: the tensor is missing, not in fp32, fp16 or bf16, or its file is
                damaged.
        """
        if name not in self._places:
            raise HyperDFlashConfigError(f"target {self.name} has no tensor for {name}.")
        source, file = self._places[name]
        if self.is_hub and (small := self._hub_tensor(file, source)) is not None:
            return small
        with self._opened(file) as opened:
            _check_dtype(file, source, opened.get_slice(source).get_dtype())
            return opened.get_tensor(source)

    @contextmanager
    def _opened(self, file: str) -> Iterator[safe_open]:
        path = self._path(file)
        try:
            with safe_open(path, "pt") as opened:
                yield opened
        except SafetensorError as error:
            raise HyperDFlashConfigError(
                f"{path} is damaged, cut short, or lacks a tensor of the index: {error}."
            ) from error

    def _hub_tensor(self, file: str, name: str) -> torch.Tensor | None:
        """Read a small tensor by its bytes; None if its file is in the cache, or has to be."""
        location = {"filename": file, "revision": self.revision}
        cached = huggingface_hub.try_to_load_from_cache(self.name, **location)
        if constants.HF_HUB_OFFLINE or isinstance(cached, str):
            return None
        try:
            metadata = huggingface_hub.parse_safetensors_file_metadata(self.name, **location)
            info = metadata.tensors[name]
        except (SafetensorsParsingError, KeyError):
            return None  # opening the file raises an error with its name
        begin, end = info.data_offsets
        if end - begin >= LARGE:
            return None
        _check_dtype(file, name, info.dtype)
        path = f"{self.name}{f'@{self.revision}' if self.revision else ''}/{file}"
        with huggingface_hub.HfFileSystem().open(path, "rb") as opened:
            opened.seek(8 + int.from_bytes(opened.read(8), "little") + begin)
            data = bytearray(opened.read(end - begin))
        return torch.frombuffer(data, dtype=DTYPES[info.dtype]).view(info.shape)

    def hc_head(self, m: int, d: int) -> HcHead | None:
        """Read the ``hc_head`` in fp32, or return None if the target does not collapse with one.

        Every spelling of the target's kind is accepted; the ``hc_head`` of an MTP layer is ignored.

        Raises:
            HyperDFlashConfigError: only some of the three tensors are there, or a shape differs.
        """
        if self.kind.gate_start != "exact":
            return None
        return self._gate(self.kind.tensors, ((m, m * d), (m,), (1,)))

    def lagged_gate(self, m: int, d: int, layers: int) -> HcHead:
        """Read the last layer's ``hc_ffn`` gate in fp32, an approximation of a final gate.

        The target uses the same formula on the residual before that layer's FFN (SGLang's
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
        """Read the three tensors, each by its first present spelling; None if none is there."""
        plain = [[_plain(name) for name in names] for names in spellings]
        present = [next((n for n in names if n in self._places), None) for names in plain]
        if not any(present):
            return None
        missing = [names[0] for names, name in zip(spellings, present, strict=True) if name is None]
        if missing:
            raise HyperDFlashConfigError(
                f"target {self.name} holds {', '.join(filter(None, present))} but not "
                f"{', '.join(missing)}; its checkpoint is incomplete."
            )
        return HcHead(*map(self._shaped, present, shapes))

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


def _check_dtype(file: str, name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise HyperDFlashConfigError(
            f"{file}: expected tensor {name} in one of {', '.join(DTYPES)}, found {dtype}."
        )


def hc_head_in(folder: str) -> HcHead | None:
    """Read the ``hc_head`` of a target on disk, some 300 KB.

    Returns None for a hub id, a target without one, and damaged files, which SGLang's loader
    reports.
    """
    if not Path(folder).is_dir():
        return None
    files = TargetFiles(folder)
    try:
        facts = TargetFacts.from_config(files.config())
        return files.hc_head(facts.hc_mult, facts.hidden_size)
    except (HyperDFlashConfigError, FileNotFoundError):
        return None


def _plain(name: str) -> str:
    """Return a checkpoint name without prefixes, in the core's scheme."""
    return core_name(name.replace("language_model.", ""))


def model_dtype(asked: str, config: Mapping[str, Any]) -> str:
    """Return the dtype in which SGLang serves: ``float32``, ``float16`` or ``bfloat16``.

    Args:
        asked: the option ``--dtype``.
        config: the target's ``config.json``, which decides for ``auto`` (SGLang's
            ``configs/model_config.py``, ``_get_and_verify_dtype``).

    Raises:
        HyperDFlashConfigError: SGLang has no such dtype.
    """
    if asked != "auto":
        if asked.lower() not in DTYPE_NAMES:
            raise HyperDFlashConfigError(
                f"--dtype must be one of auto, {', '.join(DTYPE_NAMES)}; found {asked}."
            )
        return DTYPE_NAMES[asked.lower()]
    fields = text_fields(config)
    stored = str(fields.get("dtype") or fields.get("torch_dtype")).removeprefix("torch.")
    dtype = DTYPE_NAMES.get(stored, "float32")
    if dtype == "float32":
        return "bfloat16" if str(fields.get("model_type", "")).startswith("gemma") else "float16"
    return dtype


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Load the transformers tokenizer of a target, which is a folder or a hub id.

    Raises:
        HyperDFlashConfigError: transformers finds no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise HyperDFlashConfigError(
            f"target {name} has no tokenizer that can be read ({str(error).splitlines()[0]}). "
            "Add its tokenizer files; `hyperdflash init` takes --mask-token-id instead."
        ) from error
