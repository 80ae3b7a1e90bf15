"""Checks of server arguments, each with one clear message.

Runs in the launcher before any process starts (seam: ``SpeculativeAlgorithm.register``'s
``validate_server_args``), so a bad combination costs a second and not a model load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.draft.checkpoint import check_names, expected_tensors
from sglang_hyperdflash.draft.config import (
    HyperDFlashConfig,
    check_fingerprint,
    check_target,
    load_config,
    parse_config,
)
from sglang_hyperdflash.seams import check_installed
from sglang_hyperdflash.serving.draft_kv.size import pool_ratio
from sglang_hyperdflash.serving.draft_temperature import read_draft_temperature
from sglang_hyperdflash.serving.width_settings import read_setting
from sglang_hyperdflash.targets.files import DTYPES, TargetFacts, TargetFiles
from sglang_hyperdflash.targets.kinds import check_served_target, text_fields
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# (field, unsupported when, why, what to do)
UNSUPPORTED = (
    (
        "tokenizer_worker_num",
        lambda v: v is not None and v > 1,
        "SGLang does not load plugins in extra tokenizer workers",
        "use --tokenizer-worker-num 1",
    ),
    ("pp_size", lambda v: v not in (None, 1), "block drafting needs one pipeline stage", "use tp"),
    (
        "enable_lora",
        bool,
        "LoRA changes the target that the drafter was trained for",
        "drop --enable-lora",
    ),
    (
        "lora_paths",
        bool,
        "LoRA changes the target that the drafter was trained for",
        "drop --lora-paths",
    ),
    (
        "enable_hisparse",
        bool,
        "hierarchical sparse attention needs an EAGLE-only commit step",
        "drop --enable-hisparse",
    ),
    (
        "enable_unified_memory",
        bool,
        "the unified pool admits SGLang's own algorithms only",
        "drop --enable-unified-memory",
    ),
    (
        "enable_hierarchical_cache",
        bool,
        "draft K/V restored from host memory is untested",
        "drop --enable-hierarchical-cache",
    ),
    ("enable_lmcache", bool, "LMCache rejects speculative decoding", "drop --enable-lmcache"),
    (
        "rl_on_policy_target",
        bool,
        "the baseline then samples from probabilities rounded to bf16, and a block would not",
        "drop --rl-on-policy-target",
    ),
    (
        "speculative_adaptive",
        bool,
        "it is for SGLang's own algorithms; HYPERDFLASH_WIDTH=adaptive follows the load",
        "drop the flag",
    ),
    (
        "speculative_use_block_verification",
        bool,
        "unseeded requests use block verification already, seeded ones their seed",
        "drop the flag",
    ),
    (
        "speculative_accept_threshold_single",
        lambda v: v not in (None, 1.0),
        "a threshold below 1 changes the output distribution",
        "leave it at 1.0",
    ),
    (
        "speculative_accept_threshold_acc",
        lambda v: v not in (None, 1.0),
        "a threshold below 1 changes the output distribution",
        "leave it at 1.0",
    ),
    (
        "speculative_draft_load_format",
        lambda v: v not in (None, "auto", "safetensors", "dummy"),
        "drafters are read from safetensors only",
        "drop the flag",
    ),
    (
        "enable_return_hidden_states",
        bool,
        "its rounds keep the residual before the collapse, not the states that SGLang returns",
        "drop the flag, or ask a server without speculation",
    ),
    (
        "return_hidden_states_mode",
        bool,
        "its rounds keep the residual before the collapse, not the states that SGLang returns",
        "drop the flag, or ask a server without speculation",
    ),
    ("use_ray", bool, "SGLang does not load plugins in Ray actors", "drop --use-ray"),
    (
        "grammar_backend",
        lambda v: v == "outlines",
        "SGLang can neither check a block of drafts with it nor undo a rejected draft",
        "use --grammar-backend xgrammar or llguidance",
    ),
    (
        "enable_pdmux",
        bool,
        "its split prefills bypass the speculative worker",
        "drop --enable-pdmux",
    ),
)


def validate_server_args(server_args) -> None:
    """Refuse what HYPERDFLASH cannot do losslessly, and checkpoints that do not fit.

    Raises:
        HyperDFlashConfigError: expected, found and what to do, in one message.
        SeamError: a hook is not in place.
    """
    check_installed()
    for name, unsupported, reason, advice in UNSUPPORTED:
        value = getattr(server_args, name, None)
        if unsupported(value):
            raise HyperDFlashConfigError(
                f"{ALGORITHM} does not support {name}={value!r}: {reason}; {advice}."
            )
    config = load_draft_config(server_args)
    _check_block_size(server_args, config)
    _check_window(server_args, config)
    _check_memory_saver(server_args)
    # The variables, before any load.
    read_setting(config.block_size, causal=True)
    read_draft_temperature()
    target = _hub_config(
        server_args.model_path,
        getattr(server_args, "revision", None),
        server_args.trust_remote_code,
    )
    _check_served_target(server_args, target, config)
    _check_context(server_args, target)
    draft = Path(server_args.speculative_draft_model_path)
    if draft.is_dir() and not _without_weights(server_args):
        check_draft_files(draft, _draft_hub_config(server_args).to_dict(), config)
    _check_gate(server_args, config)


def _check_gate(server_args, config: HyperDFlashConfig) -> None:
    """Compare the drafter's gate with a local target's own, of which some 300 KB are read.

    The worker compares again what was loaded, for targets of every kind and place.
    """
    folder = Path(server_args.model_path)
    if not config.reads_hc_head or not folder.is_dir() or _without_weights(server_args):
        return
    files = TargetFiles(str(folder))
    try:
        facts = TargetFacts.from_config(files.config())
        hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    except (HyperDFlashConfigError, FileNotFoundError):
        return  # SGLang's loader says what is wrong with the target
    if hc_head is not None:
        check_fingerprint(config, hc_head.fingerprint())


def check_draft_files(folder: Path, raw: Mapping[str, Any], config: HyperDFlashConfig) -> None:
    """Refuse a folder whose safetensors are not those that its ``config.json`` describes.

    Reads headers only; values are checked when the drafter is loaded
    (``draft.checkpoint.checked_tensors``).

    Raises:
        HyperDFlashConfigError: no file, a damaged one, or a tensor missing, extra, repeated, of
            another shape or of another kind; the message names the file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise HyperDFlashConfigError(
            f"--speculative-draft-model-path {folder} holds no *.safetensors; pickled weights are "
            "not loaded. Export the drafter again."
        )
    try:
        found = [pair for path in files for pair in _shapes(path)]
        check_names(found, expected_tensors(raw, config))
    except HyperDFlashConfigError as error:
        raise HyperDFlashConfigError(
            f"{folder}: {error} Copy or export the drafter again."
        ) from error


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in DTYPES:
                    raise HyperDFlashConfigError(
                        f"{path.name}: expected tensor {name} in one of {', '.join(DTYPES)}, found "
                        f"{tensor.get_dtype()}."
                    )
                yield name, tuple(tensor.get_shape())
    except SafetensorError as error:
        raise HyperDFlashConfigError(f"{path.name} is damaged or cut short: {error}.") from error


def _hub_config(path: str, revision: str | None, trust_remote_code: bool = False):
    """A folder's or hub id's configuration as SGLang reads it."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(path, trust_remote_code=trust_remote_code, revision=revision)


def _draft_hub_config(server_args):
    """The draft's configuration; never remote code."""
    revision = getattr(server_args, "speculative_draft_model_revision", None)
    return _hub_config(server_args.speculative_draft_model_path, revision)


def load_draft_config(server_args) -> HyperDFlashConfig:
    """Read the draft's config from its folder or hub id; no remote code, safetensors only."""
    path = server_args.speculative_draft_model_path
    if not path:
        raise HyperDFlashConfigError(
            f"{ALGORITHM} needs --speculative-draft-model-path: a folder or hub id of a "
            "HyperDFlash draft checkpoint."
        )
    folder = Path(path)
    local = folder.is_absolute() or folder.exists() or path.startswith(".")
    if local and not (folder / "config.json").is_file():
        raise HyperDFlashConfigError(
            f"--speculative-draft-model-path {path} holds no config.json; expected a "
            "HyperDFlash draft checkpoint folder."
        )
    if local:
        load_config(folder)  # names what is wrong with the file; transformers does not
    try:
        config = _draft_hub_config(server_args)
    except (OSError, ValueError) as error:
        raise HyperDFlashConfigError(f"cannot read the draft config of {path}: {error}") from error
    raw = config.to_dict()
    parsed = parse_config(raw)
    check_ranks(server_args, raw)
    return parsed


def _without_weights(server_args) -> bool:
    """Whether no weight is read: ``--load-format dummy``, or a plan that only counts."""
    names = ("load_format", "speculative_draft_load_format")
    return "dummy" in [getattr(server_args, name, None) for name in names]


def check_ranks(server_args, draft: Mapping[str, Any]) -> None:
    """Refuse ranks that the drafter's layers cannot be split over, before any of them starts.

    Source: the assertions of SGLang's ``DFlashAttention`` and parallel linears. K/V heads fewer
    than ranks are replicated. Attention data parallelism has groups of its own, checked there.

    Args:
        draft: the draft's ``config.json``.

    Raises:
        HyperDFlashConfigError: heads or the MLP width do not divide.
    """
    ranks = int(getattr(server_args, "tp_size", None) or 1)
    if getattr(server_args, "enable_dp_attention", False):
        return
    heads = int(draft["num_attention_heads"])
    kv_heads = int(draft["num_key_value_heads"])
    width = int(draft["intermediate_size"])
    if heads % ranks or width % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise HyperDFlashConfigError(
            f"the drafter's layers cannot be split over --tp-size {ranks}: expected its "
            f"num_attention_heads and intermediate_size to be multiples of it, and "
            f"num_key_value_heads a multiple or a divisor; found {heads}, {width} and "
            f"{kv_heads}. Choose another --tp-size."
        )


def _check_block_size(server_args, config: HyperDFlashConfig) -> None:
    for name in ("speculative_num_draft_tokens", "speculative_dflash_block_size"):
        value = getattr(server_args, name, None)
        if value is not None and int(value) != config.block_size:
            raise HyperDFlashConfigError(
                f"the drafter was trained with block size {config.block_size}; {name}={value} "
                "would lower its acceptance without an error. Drop the flag."
            )


def _check_window(server_args, config: HyperDFlashConfig) -> None:
    flag = getattr(server_args, "speculative_draft_window_size", None)
    if flag is not None and flag != config.window:
        raise HyperDFlashConfigError(
            f"the drafter was trained with window {config.window or 'none: the full context'}; "
            f"speculative_draft_window_size={flag} would lower its acceptance without an error. "
            "Drop the flag."
        )
    if config.window is None:
        return
    from sglang.srt.environ import envs

    pool_ratio()
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 with a windowed "
            "drafter: its slots are laid out before graphs are captured, and the pool would be "
            "resized afterwards. Unset the variable."
        )
    if getattr(server_args, "disaggregation_mode", None) not in (None, "null"):
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support prefill/decode disaggregation with a windowed drafter: "
            "its K/V is not in the target's slots, which are transferred. Use a drafter without a "
            "window."
        )


def _check_memory_saver(server_args) -> None:
    """Refuse to lose the drafter's weights with the memory that ``--enable-memory-saver`` frees."""
    kept = ("enable_weights_cpu_backup", "enable_draft_weights_cpu_backup")
    if getattr(server_args, "enable_memory_saver", False) and not any(
        getattr(server_args, name, False) for name in kept
    ):
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support enable_memory_saver=True alone: the target's weights "
            "are sent again after a release, the drafter's would be lost without an error. Add "
            "--enable-draft-weights-cpu-backup."
        )


def _check_context(server_args, target) -> None:
    """The drafter must have positions for all that the target may serve."""
    from sglang.srt.utils.hf_transformers_utils import get_context_length, get_hf_text_config

    def length(config) -> int:
        return int(get_context_length(get_hf_text_config(config)))

    served = server_args.context_length
    if served is None:
        served = length(target)
    drafted = length(_draft_hub_config(server_args))
    if drafted < served:
        raise HyperDFlashConfigError(
            f"expected a drafter of at least {served} positions, the server's context; found "
            f"{drafted} (max_position_embeddings of its config.json). Pass --context-length "
            f"{drafted}, or export the drafter with the target's max_position_embeddings."
        )


def _check_served_target(server_args, target, config: HyperDFlashConfig) -> None:
    raw = target.to_dict()
    kind = check_served_target(raw)
    if not kind.exposed and getattr(server_args, "enable_two_batch_overlap", False):
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support enable_two_batch_overlap with {kind.name}: SGLang has "
            "no two-batch overlap for this model. Drop the flag."
        )
    fields = text_fields(raw)
    check_target(
        config,
        architecture=fields["architectures"][0],
        hidden_size=int(fields.get("hidden_size") or 0),
        vocab_size=int(fields.get("vocab_size") or 0),
        num_hidden_layers=int(fields.get("num_hidden_layers") or 0),
        hc_mult=fields.get(kind.paths_field),
    )
