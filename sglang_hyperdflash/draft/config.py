"""Parsing and validation of a draft checkpoint's configuration.

Nothing here imports SGLang, so training and tools can use it with torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import CLOSED, OPEN, checked, json_object

DRAFT_ARCHITECTURE = "HyperDFlashDraftModel"
# The source of the context features: the residual before the collapse (HyperDFlash), or means of
# the paths after chosen layers (DFlash).
SOURCES = ("pre_hc_head", "layers")
REDUCERS = ("hc_gate", "fc")
# What an hc_gate was initialised from: the target's hc_head, or a gate of the target that
# approximates its collapse (targets.kinds). The reducer fc has no gate.
GATES = ("inherited", "approximate", "none")
# How a dependency head reads the draft row h: A * (1 + G h), or DFlash 2's A * (G h).
FORMS = ("residual", "product")
FULL = "full_attention"
# Fields of HyperDFlashConfig at the top level of ``config.json``.
_SHARED = ("block_size", "hidden_size", "vocab_size", "num_hidden_layers", "rms_norm_eps")
# On the tiny target's low-entropy text 16, 64 and 256 have the same accept length, and 256 cost a
# CPU half a millisecond a round. With 2,048 words at two nats, 64 lost 3 % of the drafts.
CANDIDATES = 64


def default_candidates(vocabulary: int) -> int:
    """Return K, the candidates of a draft row, for a config without a dependency head."""
    return min(vocabulary, CANDIDATES)


Size = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]
Epsilon = Annotated[float, Field(ge=0)]


@section(frozen=True, config=CLOSED)
class TargetIdentity:
    """The target that a drafter was made for; without an ``hc_head`` its fingerprint is None."""

    architecture: str
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Size
    hc_head_fingerprint: str | None = None


@section(frozen=True, config=CLOSED)
class DependencyConfig:
    """A dependency head: its rank r, the K candidates that it scores in a server, its form."""

    rank: Size
    top_k: Size
    form: Literal[FORMS] = FORMS[0]


@dataclass(frozen=True)
class HyperDFlashConfig:
    """The checked view of a draft ``config.json``.

    Attributes:
        block_size: B, the anchor and B-1 drafts.
        hidden_size: d, the columns of one residual path.
        hc_mult: m, the number of residual paths.
        window: W, the context tokens that a block may attend to; None for all.
        dependency: None for drafts that are independent of each other.
        causal: rows attend to no later row, so the first w - 1 drafts do not depend on width w.
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
    target_layer_ids: tuple[int, ...]
    target: TargetIdentity
    gate: str
    window: int | None
    dependency: DependencyConfig | None
    causal: bool

    @property
    def candidates(self) -> int:
        """K, the candidates of a draft row."""
        return self.dependency.top_k if self.dependency else default_candidates(self.vocab_size)

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    @property
    def reads_hc_head(self) -> bool:
        """Whether the drafter depends on the target's ``hc_head``."""
        return self.reducer == "hc_gate" and self.gate == "inherited"

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs the drafter reads; none unless the source is layers."""
        return self.target_layer_ids if self.source == "layers" else ()

    @property
    def source_width(self) -> int:
        """The number of columns of the source that the reducer reads."""
        return (len(self.captured_layers) or self.hc_mult) * self.hidden_size


@section(frozen=True, kw_only=True, config=CLOSED)
class _HyperDFlash:
    """The section ``hyperdflash_config``."""

    source: Literal[SOURCES]
    reducer: Literal[REDUCERS]
    gate: Literal[GATES]
    hc_mult: Size
    hc_eps: Epsilon
    window: Size | None
    target: TargetIdentity
    dependency: DependencyConfig | None = None


@section(frozen=True, kw_only=True, config=OPEN)
class _DFlash:
    """The section ``dflash_config``, which SGLang reads as well."""

    mask_token_id: int
    block_size: int | None = None
    target_layer_ids: tuple[Token, ...] = ()


@section(frozen=True, kw_only=True, config=OPEN)
class _Draft:
    """The fields of ``config.json`` that are read here; its others belong to the Qwen3 class."""

    block_size: Annotated[int, Field(ge=2)]
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    intermediate_size: Size
    rms_norm_eps: Epsilon
    dflash_config: _DFlash
    hyperdflash_config: _HyperDFlash
    is_causal: bool | None = None
    layer_types: tuple[str, ...] | None = None


def parse_config(config: Mapping[str, Any]) -> HyperDFlashConfig:
    """Parse and validate a draft ``config.json`` that was read as a dictionary.

    Raises:
        HyperDFlashConfigError: a field is missing, of the wrong type, or contradicts another.
    """
    architectures = config.get("architectures") or []
    if architectures != [DRAFT_ARCHITECTURE]:
        raise HyperDFlashConfigError(
            f"--speculative-draft-model-path must hold a {DRAFT_ARCHITECTURE} checkpoint; its "
            f"config.json names architectures {architectures}. Make one with "
            "`hyperdflash train`, or serve this one with its own algorithm."
        )
    if config.get("auto_map"):
        raise HyperDFlashConfigError(
            "draft config: auto_map names remote code, which is never run for a drafter. Remove "
            "auto_map from its config.json."
        )
    try:
        draft = checked(config, _Draft, "draft config")
    except HyperDFlashConfigError as error:
        if "is missing" not in str(error):
            raise
        raise HyperDFlashConfigError(
            f"{error} Re-export the drafter with this version of sglang-hyperdflash."
        ) from error
    parsed = HyperDFlashConfig(
        **vars(draft.hyperdflash_config),
        **{name: getattr(draft, name) for name in _SHARED},
        mask_token_id=draft.dflash_config.mask_token_id,
        target_layer_ids=draft.dflash_config.target_layer_ids,
        causal=bool(draft.is_causal),
    )
    _check_consistency(parsed, draft)
    return parsed


def causal_fields(layers: int) -> dict[str, Any]:
    """Return the fields of ``config.json`` that make a block causal.

    Seam: ``models/dflash.py: _get_dflash_layer_attention_params`` reads ``is_causal`` only where
    ``layer_types`` names every layer.
    """
    return {"is_causal": True, "layer_types": [FULL] * layers}


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise HyperDFlashConfigError(f"draft config: {otherwise}")


def _check_consistency(parsed: HyperDFlashConfig, draft: _Draft) -> None:
    block, vocabulary, target = parsed.block_size, parsed.vocab_size, parsed.target
    inner, window, head = draft.dflash_config.block_size, parsed.window, parsed.dependency
    _require(
        inner in (None, block),
        f"block_size is {block} but dflash_config.block_size is {inner}; both must be the block "
        "size the drafter was trained with.",
    )
    _require(
        window is None or window >= block,
        f"hyperdflash_config.window must be at least the block size {block}, found {window}.",
    )
    _require(
        head is None or head.top_k <= vocabulary,
        f"hyperdflash_config.dependency.top_k must be at most the vocabulary of {vocabulary}, "
        f"found {head and head.top_k}.",
    )
    _require(
        0 <= parsed.mask_token_id < vocabulary,
        f"dflash_config.mask_token_id {parsed.mask_token_id} is outside the vocabulary of "
        f"{vocabulary}.",
    )
    for name in ("hidden_size", "vocab_size"):
        value, expected = getattr(parsed, name), getattr(target, name)
        _require(
            value == expected,
            f"{name} {value} differs from hyperdflash_config.target.{name} {expected}; the drafter "
            "borrows the target's embedding and LM head, so they must be equal.",
        )
    if parsed.reducer == "hc_gate":
        _require(
            parsed.source == "pre_hc_head",
            f"a gate reads residual paths alone; for source {parsed.source} use reducer fc.",
        )
        _require(
            parsed.gate != "none",
            "hyperdflash_config.gate is none, which is for reducer fc; an hc_gate's is one of "
            f"{', '.join(GATES[:-1])}.",
        )
    ids, layers = parsed.captured_layers, target.num_hidden_layers
    _require(
        parsed.source != "layers" or (bool(ids) and max(ids) < layers),
        "source layers needs dflash_config.target_layer_ids between 0 and "
        f"{layers - 1}, found {list(ids)}.",
    )
    _require(
        not parsed.reads_hc_head or target.hc_head_fingerprint is not None,
        "an inherited gate needs a target with an hc_head, but hyperdflash_config.target."
        "hc_head_fingerprint is missing. Use reducer fc for a target without hc_head.",
    )
    types, expected = list(draft.layer_types or ()), [FULL] * parsed.num_hidden_layers
    _require(
        types == expected or not (types or draft.is_causal),
        f"layer_types must name {FULL} once for each of the {len(expected)} layers, found {types}. "
        "A window is hyperdflash_config.window; a causal block is is_causal.",
    )


def load_config(folder: str | Path) -> HyperDFlashConfig:
    """Read and validate the ``config.json`` of a local draft checkpoint folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise HyperDFlashConfigError(f"no config.json in the draft checkpoint folder {folder}.")
    advice = "Copy the drafter again, or export it again."
    return parse_config(json_object(path.read_bytes(), str(path), advice))


def check_target(
    config: HyperDFlashConfig, *, architecture: str, hc_mult: int | None, **sizes: int
) -> None:
    """Compare the served target with the one that the drafter was made for.

    Args:
        sizes: other fields of :class:`TargetIdentity`.

    Raises:
        HyperDFlashConfigError: the served target is another one, has no hyper-connections or has
            another number of paths.
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
    for name, value in sizes.items():
        expected = getattr(config.target, name)
        if value != expected:
            raise HyperDFlashConfigError(
                f"the drafter was made for a target ({config.target.architecture}) with "
                f"{name}={expected}; the served target {architecture} has {value}. Pass the draft "
                "checkpoint that belongs to this target."
            )


def check_fingerprint(config: HyperDFlashConfig, served: str | None) -> None:
    """Refuse a target whose ``hc_head`` is not the one that the gate was inherited from."""
    expected = config.target.hc_head_fingerprint
    if not config.reads_hc_head or expected == served:
        return
    if served is None:
        raise HyperDFlashConfigError(
            "the drafter's gate was inherited from an hc_head but the served target has none. Use "
            "a drafter with reducer fc for it."
        )
    raise HyperDFlashConfigError(
        f"the drafter was made for another target: its hc_head fingerprint is {expected}, the "
        f"served target's is {served}. Pass the draft checkpoint that belongs to this target."
    )
