"""The HYPERDFLASH worker: SGLang's DFLASH worker, lossless on every device.

What the parent does and this class relies on: prefill and verification hand over
``logits_output.hidden_states`` (here the pre-collapse residual), ``project_target_hidden``
reduces it, draft K/V go to the slots the target just wrote (so radix hits, chunked prefill and
retraction stay coherent), and one draft pass proposes the block.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_worker_v2 import (
    SIMULATE_ACC_LEN,
    _commit_accept,
    _is_all_greedy,
)
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_hyperdflash.draft.config import check_fingerprint
from sglang_hyperdflash.draft.reducer import check_kernels
from sglang_hyperdflash.seams import check_installed
from sglang_hyperdflash.serving.draft_attention import bound_graph_buffers
from sglang_hyperdflash.serving.draft_model import HyperDFlashDraftModel
from sglang_hyperdflash.serving.loaded_target import pre_collapse_residual_width, target_hc_head
from sglang_hyperdflash.serving.request_checks import mark_worker_ours
from sglang_hyperdflash.serving.verify import accept_sampled, target_probabilities
from sglang_hyperdflash.serving.window_worker import WindowedWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, SeamError

logger = logging.getLogger(__name__)


class HyperDFlashWorker(WindowedWorker):
    """Registered under ``HYPERDFLASH``; drives overlap and synchronous scheduling alike."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        check_installed()
        mark_worker_ours()
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._check_models()

    def _check_models(self) -> None:
        """Refuse a loaded pair that does not belong together (widths, block, hc_head)."""
        if not isinstance(self.draft_model, HyperDFlashDraftModel):
            raise HyperDFlashConfigError(
                f"expected a HyperDFlashDraftModel draft, found {type(self.draft_model).__name__}."
            )
        config = self.draft_model.hyperdflash_config
        if self.block_size != config.block_size:
            raise HyperDFlashConfigError(
                f"the drafter was trained with block size {config.block_size}; the server "
                f"resolved {self.block_size}."
            )
        target = self.target_worker.model_runner
        width = pre_collapse_residual_width(target.model_config.hf_text_config)
        if not config.captured_layers and width != config.hc_mult * config.hidden_size:
            raise HyperDFlashConfigError(
                f"the reducer reads residuals of width {config.hc_mult * config.hidden_size}; the "
                f"target's pre-collapse residual is {width} wide."
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
            "HYPERDFLASH ready: source=%s reducer=%s kernels=%s fused_kv=%s block_size=%d paths=%d",
            config.source,
            config.reducer,
            "triton" if hidden_norm.is_cuda else "torch",
            fused_kv,
            config.block_size,
            config.hc_mult,
        )

    def init_attention_backends(self) -> None:
        """Seam: the draft's backend is built here, its graph buffers later."""
        super().init_attention_backends()
        bound_graph_buffers(self.draft_model_runner.attn_backend, int(self.block_size))

    def _validate_phase1_sampling_support(self, batch) -> None:
        """Nothing to warn of: sampled verification is exact on every device."""

    def _accept_block(
        self,
        *,
        candidates: torch.Tensor,
        next_token_logits: torch.Tensor,
        sampling_info,
        draft_input,
        prefix_lens: torch.Tensor,
        bs: int,
        target_predict: torch.Tensor | None = None,
    ):
        """Accept a prefix of each chain; seam: ``DFlashWorkerV2._accept_block``.

        All-greedy batches keep SGLang's argmax path. Any batch with a sampled row goes through
        ``verify.py``: SGLang's own kernel is CUDA's alone and ignores min-p.
        """
        sampled = not _is_all_greedy(sampling_info) and target_predict is None
        if not sampled or SIMULATE_ACC_LEN > 0:
            return super()._accept_block(
                candidates=candidates,
                next_token_logits=next_token_logits,
                sampling_info=sampling_info,
                draft_input=draft_input,
                prefix_lens=prefix_lens,
                bs=bs,
                target_predict=target_predict,
            )
        probs = verify_probabilities(next_token_logits, sampling_info, self.block_size)
        device = probs.device
        accept_len, bonus = accept_sampled(
            candidates,
            probs,
            torch.rand(bs, self.block_size - 1, device=device),
            torch.rand(bs, device=device),
        )
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, accept_len)
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, bonus)
        out_tokens, commit_lens = _commit_accept(candidates, accept_len, bonus)
        return accept_len, commit_lens, bonus, out_tokens, None


def fused_kv_in_use(worker) -> bool:
    """Whether the worker still writes draft K/V of all layers with SGLang's one fused kernel.

    Seam: ``DFlashWorkerV2._use_fused_kv_materialize`` and ``_fused_kv_helper``. SGLang clears both,
    with no more than a warning, when the fused path cannot be set up or fails once.
    """
    try:
        return bool(worker._use_fused_kv_materialize) and worker._fused_kv_helper is not None
    except AttributeError as error:
        raise SeamError(f"SGLang seam DFlashWorkerV2 fused K/V is gone: {error}") from error


def verify_probabilities(
    next_token_logits: torch.Tensor, sampling_info, block_size: int
) -> torch.Tensor:
    """Probabilities ``[bs, B, V]`` of a verified block under each request's own parameters.

    Args:
        next_token_logits: ``[bs * B, V]`` after grammar and bias.
        sampling_info: SGLang's ``SamplingBatchInfo``; greedy rows are temperature 1, top-k 1.
    """

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).repeat_interleave(block_size)

    info = sampling_info
    flashinfer_min_p = (
        info.need_min_p_sampling and get_exec().kernel.sampling_backend == "flashinfer"
    )
    probs = target_probabilities(
        next_token_logits,
        per_row(info.temperatures),
        per_row(info.top_ks) if info.need_top_k_sampling else None,
        per_row(info.top_ps) if info.need_top_p_sampling else None,
        per_row(info.min_ps) if info.need_min_p_sampling else None,
        max_top_k=getattr(info, "max_top_k", None),
        top_p_after_top_k=flashinfer_min_p,
    )
    return probs.view(-1, block_size, probs.shape[-1])
