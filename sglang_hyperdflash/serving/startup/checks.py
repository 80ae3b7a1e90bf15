"""Checks of server arguments, each with one clear message.

Runs in the launcher before any process starts (seam: ``SpeculativeAlgorithm.register``'s
``validate_server_args``), so a bad combination costs a second and not a model load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.draft.checkpoint import weight_files
from sglang_hyperdflash.draft.config import (
    HyperDFlashConfig,
    check_fingerprint,
    check_target,
    load_config,
    parse_config,
)
from sglang_hyperdflash.seams import check_installed
from sglang_hyperdflash.serving.record.settings import check_recording
from sglang_hyperdflash.serving.settings import read_settings
from sglang_hyperdflash.serving.startup.operators import check_operator_names
from sglang_hyperdflash.targets.files import hc_head_in
from sglang_hyperdflash.targets.kinds import check_served_target, text_fields
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

_LORA = "LoRA changes the target that the drafter was trained for; drop the flag"
_THRESHOLD = "a threshold below 1 changes the output distribution; leave it at 1.0"
_STATES = (
    "its rounds keep the residual before the collapse, not the states that SGLang returns; drop "
    "the flag, or ask a server without speculation"
)
_CONFIG = "the drafter would be built from other values than are checked; edit config.json instead"
# Field -> why its values are refused and what to do. What SGLang itself refuses of every algorithm
# but its own (LMCache, its own block verification) is not repeated.
UNSUPPORTED = {
    "enable_lora": _LORA,
    "lora_paths": _LORA,
    "enable_hisparse": "its commit step exists for EAGLE only; drop the flag",
    "enable_unified_memory": "it admits SGLang's own algorithms only; drop the flag",
    "rl_on_policy_target": "the baseline then samples from probabilities rounded to bf16, and a "
    "block would not; drop the flag",
    "speculative_adaptive": "it is for SGLang's own algorithms; drop the flag: "
    "HYPERDFLASH_WIDTH=adaptive follows the load",
    "speculative_accept_threshold_single": _THRESHOLD,
    "speculative_accept_threshold_acc": _THRESHOLD,
    "speculative_draft_load_format": "drafters are read from safetensors only; drop the flag",
    "enable_return_hidden_states": _STATES,
    "return_hidden_states_mode": _STATES,
    "use_ray": "Ray actors load no plugins; drop the flag",
    "grammar_backend": "outlines: SGLang can neither check a block of drafts with it nor undo a "
    "rejected draft; use --grammar-backend xgrammar or llguidance",
    "enable_pdmux": "its split prefills bypass the speculative worker; drop the flag",
    "smg_grpc_mode": "its server does not refuse requests that end a scheduler; use HTTP",
    "json_model_override_args": _CONFIG,
    "decrypted_config_file": _CONFIG,
    "decrypted_draft_config_file": _CONFIG,
    "pp_size": "one pipeline stage drafts the whole block; use 1",
}
# Values of these fields that are served; of all others, those that mean no.
SERVED = {
    "pp_size": (1,),
    "speculative_accept_threshold_single": (None, 1),
    "speculative_accept_threshold_acc": (None, 1),
    "speculative_draft_load_format": (None, "auto", "safetensors", "dummy"),
    "json_model_override_args": ("{}",),
}
# ``DFlashWorkerV2._maybe_merge_trained_mask_embedding`` copies it into the target.
MASK_EMBEDDING = "mask_embedding.pt"
# For a drafter without a window where prompts may be computed elsewhere (``served_window``).
IMPOSED_WINDOW = 2048
# A drafter's folder in its target's.
BUNDLED = "hyperdflash"


def _refused(name: str, value: Any) -> bool:
    if name == "grammar_backend":  # other plugins may add some
        return value == "outlines"
    return value not in SERVED[name] if name in SERVED else bool(value)


def validate_server_args(server_args) -> None:
    """Refuse what HYPERDFLASH cannot do losslessly, and checkpoints that do not fit.

    Raises:
        HyperDFlashConfigError: expected, found and what to do, in one message.
        SeamError: a hook is not in place.
    """
    from sglang.srt.environ import envs
    from sglang.srt.utils.hf_transformers_utils import get_config

    check_installed()
    if envs.SGLANG_RUST_SERVER.get():
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support SGLANG_RUST_SERVER=1: its server does not refuse "
            "requests that end a scheduler, and counts no drafts. Unset the variable."
        )
    if "sglang.srt." in envs.SGLANG_HTTP_SERVER_APP_PATH.get():
        # Several tokenizer workers import this application.
        envs.SGLANG_HTTP_SERVER_APP_PATH.set("sglang_hyperdflash.serving.http_app:app")
    for name, reason in UNSUPPORTED.items():
        value = getattr(server_args, name)
        if _refused(name, value):
            raise HyperDFlashConfigError(
                f"{ALGORITHM} does not support {name}={value!r}: {reason}."
            )
    config = load_draft_config(server_args)
    draft_config = _draft_hub_config(server_args)
    check_ranks(server_args, draft_config.to_dict())
    _check_trained_sizes(server_args, config)
    if served_window(server_args, config) is not None:
        _check_window()
    _check_memory_saver(server_args)
    # The variables, before any load.
    settings = read_settings(config.block_size, config.causal)
    check_operator_names()
    check_recording(settings.recording, server_args, config.source)
    needs_real_answers = settings.recording or server_args.enable_deterministic_inference
    if needs_real_answers and envs.SGLANG_SIMULATE_ACC_LEN.get() > 0:
        raise HyperDFlashConfigError(
            f"SGLANG_SIMULATE_ACC_LEN makes answers up, which {ALGORITHM} neither records nor "
            "calls deterministic. Unset it, or HYPERDFLASH_RECORD, or drop "
            "--enable-deterministic-inference."
        )
    target = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    _check_served_target(server_args, target, config)
    _check_context(server_args, target, draft_config)
    if "dummy" in (server_args.load_format, server_args.speculative_draft_load_format):
        return
    draft = Path(server_args.speculative_draft_model_path)
    if draft.is_dir():
        _check_draft_files(draft)
    # A target elsewhere, and one of a kind that is read otherwise, is compared when it is loaded.
    gate = hc_head_in(server_args.model_path) if config.reads_hc_head else None
    if gate is not None:
        check_fingerprint(config, gate.fingerprint())


def _check_draft_files(folder: Path) -> None:
    """Refuse a folder without safetensors, or with one that is damaged or cut short.

    SGLang would load the target first and then end in a traceback that names no file. Names, shapes
    and values are checked when the drafter is loaded (``draft.checkpoint.checked_tensors``).
    """
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt"):  # compares the header with the file's length
                pass
        except SafetensorError as error:
            raise HyperDFlashConfigError(
                f"{path} is damaged or cut short: {error}. Copy or export the drafter again."
            ) from error


def _draft_hub_config(server_args):
    """The draft's configuration; never remote code."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=False,
        revision=server_args.speculative_draft_model_revision,
    )


def load_draft_config(server_args) -> HyperDFlashConfig:
    """Read the draft's config from its folder or hub id; no remote code, safetensors only."""
    path = server_args.speculative_draft_model_path
    if not path:
        target = server_args.model_path, server_args.revision, server_args.download_dir
        path = bundled_draft(*target)
        if path is None:
            raise HyperDFlashConfigError(
                f"{ALGORITHM} needs --speculative-draft-model-path: a folder or hub id of a "
                f"HyperDFlash draft checkpoint. None was found in {BUNDLED}/ of the target, or the "
                "hub could not be reached."
            )
        server_args.speculative_draft_model_path = path
    folder = Path(path)
    if folder.is_absolute() or folder.exists() or path.startswith("."):
        load_config(folder)  # names what is wrong with the file; transformers does not
        if (folder / MASK_EMBEDDING).exists():
            raise HyperDFlashConfigError(
                f"{folder / MASK_EMBEDDING} would replace a row of the target's embedding. Remove "
                "the file, or train a drafter without one."
            )
    try:
        config = _draft_hub_config(server_args)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())  # the hub's own has several lines
        raise HyperDFlashConfigError(f"cannot read the draft config of {path}: {reason}") from error
    return parse_config(config.to_dict())


def bundled_draft(
    model_path: str, revision: str | None, cache_dir: str | None = None
) -> str | None:
    """The drafter in the target's own folder or repository, as SGLang's DSPARK looks for its own.

    Source: ``speculative_hook._target_checkpoint_dspark_subfolder``.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        wanted = {"revision": revision, "cache_dir": cache_dir, "allow_patterns": f"{BUNDLED}/*"}
        try:
            folder = Path(snapshot_download(model_path, **wanted))
        except (OSError, HfHubHTTPError, HFValidationError):  # no such repository, or no network
            return None
    draft = folder / BUNDLED
    return str(draft) if (draft / "config.json").is_file() else None


def check_ranks(server_args, draft: Mapping[str, Any]) -> None:
    """Refuse ranks that the drafter's layers cannot be split over, before any of them starts.

    Source: the assertions of SGLang's ``DFlashAttention`` and parallel linears; its
    ``resolve_draft_parallel_layout`` splits drafters over a group of attention data parallelism,
    else over all ranks. K/V heads fewer than ranks are replicated.
    """
    ranks = server_args.tp_size // server_args.attn_dp_size
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    heads, kv_heads, width = (int(draft[name]) for name in names)
    if heads % ranks or width % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise HyperDFlashConfigError(
            f"the drafter's layers cannot be split over {ranks} ranks (--tp-size by "
            f"--attn-dp-size): expected its num_attention_heads and intermediate_size to be "
            f"multiples of it, and num_key_value_heads a multiple or a divisor; found {heads}, "
            f"{width} and {kv_heads}. Choose another size."
        )


def _check_trained_sizes(server_args, config: HyperDFlashConfig) -> None:
    block, window = config.block_size, config.window
    for name, size, trained in (
        ("speculative_num_draft_tokens", block, f"block size {block}"),
        ("speculative_dflash_block_size", block, f"block size {block}"),
        ("speculative_draft_window_size", window, f"window {window or 'none: the full context'}"),
    ):
        value = getattr(server_args, name)
        if value not in (None, size):
            raise HyperDFlashConfigError(
                f"the drafter was trained with {trained}; {name}={value} would lower its "
                "acceptance without an error. Drop the flag."
            )


def served_window(server_args, config: HyperDFlashConfig) -> int | None:
    """Context tokens that the drafter sees: its own window, or the one of a server that needs one.

    Where another node or a storage computed a prompt, there are no draft K/V of it: the keys of
    SGLang's storage name the target alone, and a prefill node may have no drafter. A window begins
    empty and holds what this server computes.
    """
    elsewhere = (
        server_args.disaggregation_mode not in (None, "null")
        or server_args.hicache_storage_backend
        or server_args.enable_unified_cache_external_linker
    )
    return config.window or (IMPOSED_WINDOW if elsewhere else None)


def _check_window() -> None:
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 with a windowed "
            "drafter: its slots are laid out before graphs are captured, and the pool would be "
            "resized afterwards. Unset the variable."
        )


def _check_memory_saver(server_args) -> None:
    """Refuse ``--enable-memory-saver`` if the drafter's weights would be lost with its memory."""
    kept = server_args.enable_weights_cpu_backup or server_args.enable_draft_weights_cpu_backup
    if server_args.enable_memory_saver and not kept:
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support enable_memory_saver=True alone: the target's weights "
            "are sent again after a release, the drafter's would be lost without an error. Add "
            "--enable-draft-weights-cpu-backup."
        )


def _check_context(server_args, target, draft) -> None:
    """The drafter must have positions for all that the target may serve."""
    from sglang.srt.utils.hf_transformers_utils import get_context_length, get_hf_text_config

    trained, drafted = (int(get_context_length(get_hf_text_config(c))) for c in (target, draft))
    served = server_args.context_length or trained
    if drafted < served:
        raise HyperDFlashConfigError(
            f"expected a drafter of at least {served} positions, the server's context; found "
            f"{drafted} (max_position_embeddings of its config.json). Pass --context-length "
            f"{drafted}, or export the drafter with the target's max_position_embeddings."
        )


def _check_served_target(server_args, target, config: HyperDFlashConfig) -> None:
    raw = target.to_dict()
    kind = check_served_target(raw)
    if not kind.exposed and server_args.enable_two_batch_overlap:
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support enable_two_batch_overlap with {kind.name}: SGLang has "
            "no two-batch overlap for this model. Drop the flag."
        )
    fields = text_fields(raw)
    _check_compressor_rings(fields, config)
    check_target(
        config,
        architecture=fields["architectures"][0],
        hidden_size=int(fields.get("hidden_size") or 0),
        vocab_size=int(fields.get("vocab_size") or 0),
        num_hidden_layers=int(fields.get("num_hidden_layers") or 0),
        hc_mult=fields.get(kind.paths_field),
    )


def _check_compressor_rings(fields: Mapping[str, Any], config: HyperDFlashConfig) -> None:
    """Refuse a block of more rows than SGLang's DeepSeek-V4 compressors can take back.

    A ring keeps the last rows of a request; a wider block would overwrite rows that a shorter
    acceptance still needs. That of ratio 4 is the smallest. SGLang asserts the same once the target
    is loaded. Seams: ``get_compress_state_ring_size``, ``get_compress_state_write_pad``.
    """
    if 4 not in (fields.get("compress_ratios") or ()):
        return
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

    ring = pools.get_compress_state_ring_size(4, config.block_size)
    most = pools.get_compress_state_write_pad(4, ring)
    if config.block_size > most:
        raise HyperDFlashConfigError(
            f"expected a drafter of at most {most} rows a block, which SGLang's compressor ring of "
            f"{ring} rows can verify; found block size {config.block_size}. Make and train a "
            f"drafter with --block-size {most} or less."
        )
