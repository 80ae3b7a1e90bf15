"""Checks of server arguments, each with one clear message.

Runs in the launcher before any process starts (seam: ``SpeculativeAlgorithm.register``'s
``validate_server_args``), so a bad combination costs a second and not a model load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.draft.config import (
    HyperDFlashConfig,
    check_fingerprint,
    check_target,
    load_config,
    parse_config,
)
from sglang_hyperdflash.seams import check_installed
from sglang_hyperdflash.serving.draft_kv.size import pool_ratio
from sglang_hyperdflash.serving.drafting.temperature import read_draft_temperature
from sglang_hyperdflash.serving.width.settings import read_setting
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.targets.kinds import check_served_target, text_fields
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

_LORA = "LoRA changes the target that the drafter was trained for; drop the flag"
_THRESHOLD = "a threshold below 1 changes the output distribution; leave it at 1.0"
_STATES = (
    "its rounds keep the residual before the collapse, not the states that SGLang returns; drop "
    "the flag, or ask a server without speculation"
)


def _not_one(value: object) -> bool:
    return value not in (None, 1)


# Field -> values that are refused; the reason and what to do. What SGLang itself refuses of every
# algorithm but its own (pipeline stages, LMCache, its own block verification) is not repeated.
UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tokenizer_worker_num": (_not_one, "extra tokenizer workers load no plugins; use 1"),
    "enable_lora": (bool, _LORA),
    "lora_paths": (bool, _LORA),
    "enable_hisparse": (bool, "its commit step exists for EAGLE only; drop the flag"),
    "enable_unified_memory": (bool, "it admits SGLang's own algorithms only; drop the flag"),
    "enable_hierarchical_cache": (
        bool,
        "draft K/V restored from host memory is untested; drop the flag",
    ),
    "rl_on_policy_target": (
        bool,
        "the baseline then samples from probabilities rounded to bf16, and a block would not; "
        "drop the flag",
    ),
    "speculative_adaptive": (
        bool,
        "it is for SGLang's own algorithms; drop the flag: HYPERDFLASH_WIDTH=adaptive follows the "
        "load",
    ),
    "speculative_accept_threshold_single": (_not_one, _THRESHOLD),
    "speculative_accept_threshold_acc": (_not_one, _THRESHOLD),
    "speculative_draft_load_format": (
        lambda value: value not in (None, "auto", "safetensors", "dummy"),
        "drafters are read from safetensors only; drop the flag",
    ),
    "enable_return_hidden_states": (bool, _STATES),
    "return_hidden_states_mode": (bool, _STATES),
    "use_ray": (bool, "Ray actors load no plugins; drop the flag"),
    "grammar_backend": (
        lambda value: value == "outlines",
        "SGLang can neither check a block of drafts with it nor undo a rejected draft; use "
        "--grammar-backend xgrammar or llguidance",
    ),
    "enable_pdmux": (bool, "its split prefills bypass the speculative worker; drop the flag"),
}


def validate_server_args(server_args) -> None:
    """Refuse what HYPERDFLASH cannot do losslessly, and checkpoints that do not fit.

    Raises:
        HyperDFlashConfigError: expected, found and what to do, in one message.
        SeamError: a hook is not in place.
    """
    check_installed()
    for name, (refused, reason) in UNSUPPORTED.items():
        value = getattr(server_args, name, None)
        if refused(value):
            raise HyperDFlashConfigError(
                f"{ALGORITHM} does not support {name}={value!r}: {reason}."
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
        check_draft_files(draft)
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


def check_draft_files(folder: Path) -> None:
    """Refuse a folder without safetensors, or with one that is damaged or cut short.

    SGLang would load the target first and then end in a traceback that names no file. Names, shapes
    and values are checked when the drafter is loaded (``draft.checkpoint.checked_tensors``).

    Raises:
        HyperDFlashConfigError: the message names the file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise HyperDFlashConfigError(
            f"--speculative-draft-model-path {folder} holds no *.safetensors; pickled weights are "
            "not loaded. Export the drafter again."
        )
    for path in files:
        try:
            with safe_open(path, "pt"):  # compares the header with the file's length
                pass
        except SafetensorError as error:
            raise HyperDFlashConfigError(
                f"{path} is damaged or cut short: {error}. Copy or export the drafter again."
            ) from error


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
    """Refuse ``--enable-memory-saver`` if the drafter's weights would be lost with its memory."""
    backups = ("enable_weights_cpu_backup", "enable_draft_weights_cpu_backup")
    if getattr(server_args, "enable_memory_saver", False) and not any(
        getattr(server_args, name, False) for name in backups
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
