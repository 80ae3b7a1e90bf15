"""The draft checkpoint's configuration: parsed and validated in one place (DESIGN, section 4).

Nothing here imports SGLang, so training and tools can use it on a bare torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

DRAFT_ARCHITECTURE = "HyperDFlashDraftModel"
# Where the context features come from: the residual in front of the collapse (the method); the
# collapse itself, and means of the paths after chosen layers (DFlash), to compare with.
SOURCES = ("pre_hc_head", "post_hc_head", "layers")
REDUCERS = ("hc_gate", "fc")
# What an hc_gate started from: the target's hc_head, nothing, a gate of the target that only
# resembles its collapse, or the constant gate of a mean (targets.py).
GATES = ("inherited", "random", "approximate", "constant")


@dataclass(frozen=True)
class TargetIdentity:
    """What a drafter was made for; ``hc_head_fingerprint`` is None for a target without one."""

    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    hc_head_fingerprint: str | None


@dataclass(frozen=True)
class HyperDFlashConfig:
    """The checked view of a draft ``config.json``.

    Symbols of the paper: ``m`` residual paths, ``d`` hidden width, ``block_size`` B (the anchor
    plus B-1 drafts). ``window`` is W, the context tokens that a block may see; None for all.
    """

    block_size: int
    mask_token_id: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    source: str
    reducer: str
    hc_mult: int
    hc_eps: float
    rms_norm_eps: float
    path_norm: bool
    target_layer_ids: tuple[int, ...]
    target: TargetIdentity
    gate: str = "inherited"
    window: int | None = None

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    @property
    def reads_hc_head(self) -> bool:
        """Whether the drafter depends on the target's ``hc_head``."""
        gated = self.reducer == "hc_gate" and self.gate in ("inherited", "random")
        return gated or self.source == "post_hc_head"

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads: none unless the source is ``layers``."""
        return self.target_layer_ids if self.source == "layers" else ()

    @property
    def source_width(self) -> int:
        """Columns of the source that the reducer reads."""
        paths = {"pre_hc_head": self.hc_mult, "layers": len(self.target_layer_ids)}
        return paths.get(self.source, 1) * self.hidden_size


def _require(mapping: Mapping[str, Any], name: str, kind: type | tuple, where: str) -> Any:
    if name not in mapping:
        raise HyperDFlashConfigError(
            f"draft config: {where}{name} is missing. Re-export the drafter with this version of "
            "sglang-hyperdflash."
        )
    value = mapping[name]
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise HyperDFlashConfigError(
            f"draft config: {where}{name} must be {getattr(kind, '__name__', kind)}, "
            f"found {value!r}."
        )
    return value


def _choice(value: str, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        raise HyperDFlashConfigError(
            f"draft config: {where} must be one of {', '.join(allowed)}; found {value!r}."
        )
    return value


def _parse_target(section: Mapping[str, Any]) -> TargetIdentity:
    where = "hyperdflash_config.target."
    fingerprint = section.get("hc_head_fingerprint")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise HyperDFlashConfigError(
            f"draft config: {where}hc_head_fingerprint must be text or null, found {fingerprint!r}."
        )
    return TargetIdentity(
        architecture=_require(section, "architecture", str, where),
        hidden_size=_require(section, "hidden_size", int, where),
        vocab_size=_require(section, "vocab_size", int, where),
        num_hidden_layers=_require(section, "num_hidden_layers", int, where),
        hc_head_fingerprint=fingerprint,
    )


def _window(section: Mapping[str, Any]) -> int | None:
    if section.get("window") is None:
        return None
    return _require(section, "window", int, "hyperdflash_config.")


def _layer_ids(dflash: Mapping[str, Any]) -> tuple[int, ...]:
    found = dflash.get("target_layer_ids") or []
    if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
        raise HyperDFlashConfigError(
            f"draft config: dflash_config.target_layer_ids must be a list of layer numbers, "
            f"found {found!r}."
        )
    return tuple(found)


def parse_config(config: Mapping[str, Any]) -> HyperDFlashConfig:
    """Parse and validate a draft ``config.json`` read as a dictionary.

    Raises:
        HyperDFlashConfigError: a field is missing, of the wrong type, or contradicts another.
    """
    architectures = config.get("architectures") or []
    if DRAFT_ARCHITECTURE not in architectures:
        raise HyperDFlashConfigError(
            f"--speculative-draft-model-path must hold a {DRAFT_ARCHITECTURE} checkpoint; its "
            f"config.json names architectures {list(architectures)}. Make one with "
            "`hyperdflash train`, or serve this one with its own algorithm."
        )
    if config.get("auto_map"):
        raise HyperDFlashConfigError(
            "draft config: auto_map names remote code, which is never run for a drafter. Remove "
            "auto_map from its config.json."
        )
    dflash = _require(config, "dflash_config", Mapping, "")
    section = _require(config, "hyperdflash_config", Mapping, "")
    where = "hyperdflash_config."
    parsed = HyperDFlashConfig(
        block_size=_require(config, "block_size", int, ""),
        mask_token_id=_require(dflash, "mask_token_id", int, "dflash_config."),
        hidden_size=_require(config, "hidden_size", int, ""),
        vocab_size=_require(config, "vocab_size", int, ""),
        num_hidden_layers=_require(config, "num_hidden_layers", int, ""),
        source=_choice(_require(section, "source", str, where), SOURCES, where + "source"),
        reducer=_choice(_require(section, "reducer", str, where), REDUCERS, where + "reducer"),
        hc_mult=_require(section, "hc_mult", int, where),
        hc_eps=float(_require(section, "hc_eps", (int, float), where)),
        rms_norm_eps=float(_require(config, "rms_norm_eps", (int, float), "")),
        path_norm=_require(section, "path_norm", bool, where),
        target_layer_ids=_layer_ids(dflash),
        target=_parse_target(_require(section, "target", Mapping, where)),
        # Checkpoints older than the field inherit.
        gate=_choice(section.get("gate", "inherited"), GATES, where + "gate"),
        window=_window(section),
    )
    _check_consistency(parsed, dflash)
    return parsed


def _check_consistency(parsed: HyperDFlashConfig, dflash: Mapping[str, Any]) -> None:
    inner = dflash.get("block_size", parsed.block_size)
    if inner != parsed.block_size:
        raise HyperDFlashConfigError(
            f"draft config: block_size is {parsed.block_size} but dflash_config.block_size is "
            f"{inner!r}; both must be the block size the drafter was trained with."
        )
    if parsed.block_size < 2:
        raise HyperDFlashConfigError(
            f"draft config: block_size must be at least 2 (the anchor and one draft), "
            f"found {parsed.block_size}."
        )
    if parsed.window is not None and parsed.window < parsed.block_size:
        raise HyperDFlashConfigError(
            f"draft config: hyperdflash_config.window must be at least the block size "
            f"{parsed.block_size}, found {parsed.window}."
        )
    if not 0 <= parsed.mask_token_id < parsed.vocab_size:
        raise HyperDFlashConfigError(
            f"draft config: dflash_config.mask_token_id {parsed.mask_token_id} is outside the "
            f"vocabulary of {parsed.vocab_size}."
        )
    if parsed.hc_mult < 1:
        raise HyperDFlashConfigError(
            f"draft config: hyperdflash_config.hc_mult must be at least 1, found {parsed.hc_mult}."
        )
    for name in ("hidden_size", "vocab_size"):
        if getattr(parsed, name) != getattr(parsed.target, name):
            raise HyperDFlashConfigError(
                f"draft config: {name} {getattr(parsed, name)} differs from "
                f"hyperdflash_config.target.{name} {getattr(parsed.target, name)}; the drafter "
                "borrows the target's embedding and LM head, so they must be equal."
            )
    if parsed.reducer == "hc_gate" and parsed.source != "pre_hc_head":
        raise HyperDFlashConfigError(
            f"draft config: source {parsed.source} has no residual paths to gate; use reducer fc."
        )
    _check_layer_ids(parsed)
    if parsed.reads_hc_head and parsed.target.hc_head_fingerprint is None:
        raise HyperDFlashConfigError(
            f"draft config: source {parsed.source} with reducer {parsed.reducer} needs a target "
            "with an hc_head, but hyperdflash_config.target.hc_head_fingerprint is missing. Use "
            "source pre_hc_head with reducer fc for a target without hc_head."
        )


def _check_layer_ids(parsed: HyperDFlashConfig) -> None:
    if parsed.source != "layers":
        return
    layers = parsed.target.num_hidden_layers
    if not parsed.target_layer_ids or max(parsed.target_layer_ids) >= layers:
        raise HyperDFlashConfigError(
            f"draft config: source layers needs dflash_config.target_layer_ids between 0 and "
            f"{layers - 1}, found {list(parsed.target_layer_ids)}."
        )


def load_config(folder: str | Path) -> HyperDFlashConfig:
    """Read and validate ``config.json`` of a local draft checkpoint folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise HyperDFlashConfigError(f"no config.json in the draft checkpoint folder {folder}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise HyperDFlashConfigError(f"{path} is not JSON: {error}.") from error
    return parse_config(config)


def check_target(
    config: HyperDFlashConfig,
    *,
    architecture: str,
    hidden_size: int,
    vocab_size: int,
    num_hidden_layers: int,
    hc_mult: int | None,
) -> None:
    """Compare what the drafter was made for with the target that is being served.

    Raises:
        HyperDFlashConfigError: the target is another one, has no hyper-connections or another
            number of paths.
    """
    if hc_mult is None:
        raise HyperDFlashConfigError(
            f"HYPERDFLASH needs a target with hyper-connection residual streams; {architecture} "
            "has no hc_mult in its config. Use DFLASH or EAGLE for this model."
        )
    if hc_mult != config.hc_mult:
        raise HyperDFlashConfigError(
            f"the drafter was made for hc_mult={config.hc_mult} residual paths, the target has "
            f"{hc_mult}."
        )
    found = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_hidden_layers,
    }
    for name, value in found.items():
        expected = getattr(config.target, name)
        if value != expected:
            raise HyperDFlashConfigError(
                f"the drafter was made for a target ({config.target.architecture}) with "
                f"{name}={expected}; the served target {architecture} has {value}. Pass the draft "
                "checkpoint that belongs to this target."
            )


def check_fingerprint(config: HyperDFlashConfig, found: str | None) -> None:
    """Refuse a target whose ``hc_head`` is not the one that the gate was inherited from."""
    expected = config.target.hc_head_fingerprint
    if not config.reads_hc_head or expected == found:
        return
    if found is None:
        raise HyperDFlashConfigError(
            f"the drafter's reducer is {config.reducer} (source {config.source}) but the served "
            "target has no hc_head. Use a drafter with reducer fc, source pre_hc_head, for it."
        )
    raise HyperDFlashConfigError(
        f"the drafter was made for another target: its hc_head fingerprint is {expected}, the "
        f"served target's is {found}. Pass the draft checkpoint that belongs to this target."
    )
