"""The HYPERDFLASH worker: SGLang's DFLASH worker, lossless on every device.

What the parent does and this class relies on: prefill and verification hand over
``logits_output.hidden_states`` (here the pre-collapse residual), ``project_target_hidden``
reduces it, draft K/V go to the slots the target just wrote (so radix hits, chunked prefill and
retraction stay coherent), and one draft pass proposes the block.
"""

from __future__ import annotations

import logging

import torch

from sglang_hyperdflash.draft.config import check_fingerprint
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.draft.reducer import check_kernels
from sglang_hyperdflash.seams import check_installed
from sglang_hyperdflash.serving.draft_kv.attention import bound_graph_buffers
from sglang_hyperdflash.serving.draft_model import HyperDFlashDraftModel
from sglang_hyperdflash.serving.startup.shared_residual import SharedResidual
from sglang_hyperdflash.serving.width_worker import WidthWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, SeamError

logger = logging.getLogger(__name__)


class HyperDFlashWorker(WidthWorker):
    """Registered under ``HYPERDFLASH``; drives overlap and synchronous scheduling alike."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        check_installed()
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._check_models()
        # The target's graphs are captured later.
        self.target_worker.model_runner.capture_tail_hooks.append(SharedResidual())

    def _check_models(self) -> None:
        """Refuse a loaded pair that does not belong together (widths, block, hc_head)."""
        if not isinstance(self.draft_model, HyperDFlashDraftModel):
            raise HyperDFlashConfigError(
                f"expected a HyperDFlashDraftModel draft, found {type(self.draft_model).__name__}."
            )
        config = self.draft_model.hyperdflash_config
        if self.block_size != config.block_size:
            raise HyperDFlashConfigError(
                f"expected block size {config.block_size}, which the drafter was trained with; "
                f"found {self.block_size}. Drop the flags that set it."
            )
        target = self.target_worker.model_runner
        facts = target.model_config.hf_text_config
        width = (getattr(facts, "hc_mult", None) or 0) * facts.hidden_size
        if not config.captured_layers and width != config.hc_mult * config.hidden_size:
            raise HyperDFlashConfigError(
                f"expected a target whose pre-collapse residual has "
                f"{config.hc_mult * config.hidden_size} values, which the drafter reads; found "
                f"{width}. Serve the target that the drafter was trained for."
            )
        hc_head = target_hc_head(target.model)
        check_fingerprint(config, None if hc_head is None else hc_head.fingerprint())
        hidden_norm = self.draft_model.hidden_norm.weight
        check_kernels(self.draft_model.reducer_module, hidden_norm)
        fused_kv = fused_kv_in_use(self)
        if hidden_norm.is_cuda and not fused_kv:
            logger.warning(
                "HYPERDFLASH: SGLang's fused draft K/V write is off; see its message above"
            )
        logger.info(
            "HYPERDFLASH ready: source=%s reducer=%s kernels=%s fused_kv=%s block_size=%d paths=%d "
            "head=%s causal=%s",
            config.source,
            config.reducer,
            "triton" if hidden_norm.is_cuda else "torch",
            fused_kv,
            config.block_size,
            config.hc_mult,
            f"rank {config.dependency.rank}, K {self.num_candidates}" if self.dependency else None,
            config.causal,
        )

    def init_attention_backends(self) -> None:
        """Seam: the draft's backend is built here, its graph buffers later."""
        super().init_attention_backends()
        bound_graph_buffers(self.draft_model_runner.attn_backend, int(self.block_size))

    def _validate_phase1_sampling_support(self, batch) -> None:
        """Nothing to warn of: sampled verification is exact on every device."""


def fused_kv_in_use(worker) -> bool:
    """Whether the worker still writes draft K/V of all layers with SGLang's one fused kernel.

    Seam: ``DFlashWorkerV2._use_fused_kv_materialize`` and ``_fused_kv_helper``. SGLang clears both,
    with no more than a warning, when the fused path cannot be set up or fails once.
    """
    try:
        return bool(worker._use_fused_kv_materialize) and worker._fused_kv_helper is not None
    except AttributeError as error:
        raise SeamError(f"SGLang seam DFlashWorkerV2 fused K/V is gone: {error}") from error


def target_hc_head(model: torch.nn.Module) -> HcHead | None:
    """The ``hc_head`` of a loaded target, or None without one.

    Seam: ``hc_head_fn/base/scale`` on ``model.model`` of SGLang's ``DeepseekV4ForCausalLM``, and of
    the portable target; on ``model.model.hc_head`` of ``HYV4ForCausalLM``, ``fn`` as a linear.
    """
    inner = getattr(model, "model", model)
    head = getattr(inner, "hc_head", None)
    # DeepSeek-V4's own hc_head is a method.
    owner = head if isinstance(head, torch.nn.Module) else inner
    found = [getattr(owner, f"hc_head_{name}", None) for name in ("fn", "base", "scale")]
    found[0] = getattr(found[0], "weight", found[0])
    return HcHead(*found) if all(isinstance(t, torch.Tensor) for t in found) else None
