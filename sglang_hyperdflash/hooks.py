"""Every private SGLang function that this extension touches, one named seam each.

SGLang's plugin loader logs exceptions and goes on, so a hook that could not be applied would be
silent: ``check_seams`` is therefore called again when the server arguments are validated and
when the worker is created, and refuses to start, naming the seam. A seam also records the
parameter names it relies on, so another SGLang fails at once and not in the middle of a request.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from sglang_hyperdflash import ALGORITHM, SGLANG_VERSION, is_ours
from sglang_hyperdflash.capture_hook import CAPTURE_FOLDER, write_prefill_residual
from sglang_hyperdflash.position_metrics import metrics_seam
from sglang_hyperdflash.residual import residual_seam
from sglang_hyperdflash.round_times import ROUND_TIMES, time_round, time_target


class SeamError(RuntimeError):
    """SGLang is not the version, or has not the shape, that a hook was written for."""


@dataclass(frozen=True)
class Seam:
    """One hook: its target, its kind, why it is needed and the parameters it relies on."""

    target: str
    kind: str  # "after", "around" or "replace"
    hook: Callable
    parameters: tuple[str, ...]
    reason: str
    cpu_only: bool = False
    only_with: str | None = None  # an environment variable; without it the seam is not used


def suppress_aux_capture(config, *args, **kwargs):
    """Keep the pre-collapse residual, unless the drafter's source is captured layers.

    The target hands the residual to the logits processor as ``hidden_states_before_norm``;
    ``configure_aux_hidden_state_capture`` would demand a capture method the target lacks.
    """
    if is_ours(kwargs["spec_algorithm"]) and config.dflash_use_aux_hidden_state:
        section = getattr(config.draft_model_config.hf_config, "hyperdflash_config", None) or {}
        if section.get("source") == "layers":
            return config
        config.dflash_use_aux_hidden_state = False
        config.dflash_target_layer_ids = None
    return config


def keep_draft_embedding_dtype(kwargs, self, forward_batch, *args, **rest):
    """Cast draft input embeddings to the draft's dtype, not always to bfloat16."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
    return kwargs


def no_triton_rope(result, self, *args, **kwargs):
    """Use the draft layers' plain q/k norm and RoPE: the fused one is a Triton kernel."""
    self.use_table_qk_norm_rope = False


def _seams() -> tuple[Seam, ...]:
    from sglang_hyperdflash.deepseek_v4 import deepseek_v4_seams
    from sglang_hyperdflash.reference.eagle_seams import eagle_seams
    from sglang_hyperdflash.reference.parallel_seams import parallel_seams
    from sglang_hyperdflash.reference.seeded_seams import seeded_seams
    from sglang_hyperdflash.sampling_seams import sampling_seams

    return (
        *_worker_seams(),
        *_dflash_cpu_seams(),
        _capture_seam(),
        residual_seam(),
        *deepseek_v4_seams(),
        *eagle_seams(),
        *parallel_seams(),
        *seeded_seams(),
        *sampling_seams(),
        metrics_seam(),
        *_timing_seams(),
    )


def _worker_seams() -> tuple[Seam, ...]:
    return (
        Seam(
            "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state"
            ".resolve_spec_aux_hidden_state_config",
            "after",
            suppress_aux_capture,
            ("server_args", "model_config", "spec_algorithm", "is_draft_worker"),
            "the pre-collapse residual must reach the worker, not captured layers",
        ),
        Seam(
            "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
            "after",
            keep_draft_embedding_dtype,
            ("self", "forward_batch", "pp_proxy_tensors"),
            "draft embeddings are cast to bfloat16 whatever the draft's dtype",
        ),
    )


def _dflash_cpu_seams() -> tuple[Seam, ...]:
    from sglang_hyperdflash.reference.torch_ops import assign_req_to_token_pool

    return (
        Seam(
            "sglang.srt.models.dflash.DFlashAttention.__init__",
            "after",
            no_triton_rope,
            ("self", "config", "layer_id", "quant_config", "prefix"),
            "the fused q/k norm and RoPE of the draft layers is a Triton kernel",
            cpu_only=True,
        ),
        Seam(
            "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            "replace",
            assign_req_to_token_pool,
            (
                "req_pool_indices",
                "req_to_token",
                "start_offset",
                "end_offset",
                "out_cache_loc",
                "batch_size",
            ),
            "the request-to-token writer of speculative decoding is a Triton kernel",
            cpu_only=True,
        ),
    )


def _capture_seam() -> Seam:
    return Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._append_prefill_hidden_states",
        "around",
        write_prefill_residual,
        (
            "self",
            "req",
            "logits_output",
            "hidden_state_offset",
            "capture_hidden_mode",
            "extend_input_len",
            "store",
        ),
        "captured residuals go to disk, not through two processes as Python numbers",
        only_with=CAPTURE_FOLDER,
    )


def _timing_seams() -> tuple[Seam, ...]:
    reason = "the time of a round is measured where every algorithm passes"
    return (
        Seam(
            "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
            "around",
            time_target,
            (
                "self",
                "batch",
                "forward_batch",
                "pp_proxy_tensors",
                "is_verify",
                "skip_attn_backend_init",
                "capture_hidden_mode",
                "return_kv_loc_plan",
            ),
            reason,
            only_with=ROUND_TIMES,
        ),
        Seam(
            "sglang.srt.managers.scheduler.Scheduler.run_batch",
            "around",
            time_round,
            ("self", "batch", "pp_proxy_tensors"),
            reason,
            only_with=ROUND_TIMES,
        ),
    )


def active_seams() -> tuple[Seam, ...]:
    """The seams this process needs: CPU ones on the reference platform, capture's in captures."""
    from sglang_hyperdflash.reference.activation import is_active

    on_cpu = is_active()
    return tuple(
        seam
        for seam in _seams()
        if (on_cpu or not seam.cpu_only)
        and (seam.only_with is None or seam.only_with in os.environ)
    )


def install() -> None:
    """Register every active seam with SGLang's hook registry (applied by its plugin loader)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    kinds = {kind.value: kind for kind in HookType}
    for seam in active_seams():
        check_signature(seam)
        HookRegistry.register(seam.target, seam.hook, kinds[seam.kind])


def check_version() -> None:
    """Refuse any SGLang but the pinned one."""
    found = metadata.version("sglang")
    if found.split("+")[0] != SGLANG_VERSION:
        raise SeamError(
            f"sglang-hyperdflash works with sglang=={SGLANG_VERSION}; found {found}. "
            f"Run: pip install sglang=={SGLANG_VERSION}"
        )


def check_signature(seam: Seam) -> None:
    """Refuse a seam whose parameters are not the ones its hook relies on."""
    try:
        function = inspect.unwrap(pkgutil.resolve_name(seam.target))
    except (AttributeError, ImportError) as error:
        raise SeamError(f"SGLang seam {seam.target} is gone: {error}") from error
    found = tuple(inspect.signature(function).parameters)
    if found != seam.parameters:
        raise SeamError(
            f"SGLang seam {seam.target} changed: expected parameters {seam.parameters}, found "
            f"{found}. Use sglang=={SGLANG_VERSION}."
        )


def check_seams() -> None:
    """Raise ``SeamError`` naming every seam whose hook is not in place in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [seam.target for seam in active_seams() if seam.target not in HookRegistry._patched]
    if missing:
        raise SeamError(
            f"{ALGORITHM} cannot start: these SGLang hooks are not in place: {', '.join(missing)}. "
            f"Check that SGLANG_PLUGINS does not exclude hyperdflash, that sglang is "
            f"{SGLANG_VERSION}, and the log above for the loader's error."
        )


def pre_collapse_residual_width(target_config) -> int | None:
    """``m * d`` of a target config with hyper-connections, or None for one without."""
    hc_mult = getattr(target_config, "hc_mult", None)
    return None if hc_mult is None else int(hc_mult) * int(target_config.hidden_size)


def target_hc_head(model: torch.nn.Module) -> tuple[torch.Tensor, ...] | None:
    """``(fn [m, m*d], base [m], scale [1])`` of a loaded target, or None without an hc_head.

    Seam: ``hc_head_fn/base/scale`` on ``model.model`` of SGLang's ``DeepseekV4ForCausalLM``, and of
    the portable target; on ``model.model.hc_head`` of ``HYV4ForCausalLM``, ``fn`` as a linear.
    """
    inner = getattr(model, "model", model)
    head = getattr(inner, "hc_head", None)
    # DeepSeek-V4's own hc_head is a method.
    owner = head if isinstance(head, torch.nn.Module) else inner
    found = [getattr(owner, f"hc_head_{name}", None) for name in ("fn", "base", "scale")]
    found[0] = getattr(found[0], "weight", found[0])
    return tuple(found) if all(isinstance(t, torch.Tensor) for t in found) else None


def fused_kv_in_use(worker) -> bool:
    """Whether the worker still writes draft K/V of all layers with SGLang's one fused kernel.

    Seam: ``DFlashWorkerV2._use_fused_kv_materialize`` and ``_fused_kv_helper``. SGLang clears both,
    with no more than a warning, when the fused path cannot be set up or fails once.
    """
    try:
        return bool(worker._use_fused_kv_materialize) and worker._fused_kv_helper is not None
    except AttributeError as error:
        raise SeamError(f"SGLang seam DFlashWorkerV2 fused K/V is gone: {error}") from error
