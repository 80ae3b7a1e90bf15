"""The ``HYPERDFLASH`` algorithm object that SGLang's speculative framework dispatches on.

SGLang's ``CustomSpecAlgo`` duck-types its enum but lacks methods that the scheduler calls
unconditionally; what follows from :meth:`is_dflash` alone is the enum's own function.
"""

from __future__ import annotations

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.draft_kv.attention import (
    check_window_attention,
    choose_draft_attention,
)
from sglang_hyperdflash.serving.startup.checks import load_draft_config, served_window
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# KV dtypes of an unquantised cache.
PLAIN_KV = (None, "auto", "bfloat16", "bf16")


class HyperDFlashAlgorithm(CustomSpecAlgo):
    """A DFLASH-family algorithm: block drafts, one chain verified by one target pass."""

    def is_dflash(self) -> bool:
        return True

    is_dflash_family = SpeculativeAlgorithm.is_dflash_family
    supports_grammar_overlap = SpeculativeAlgorithm.supports_grammar_overlap
    supports_prefill_shared_read_done = SpeculativeAlgorithm.supports_prefill_shared_read_done
    supports_target_verify_for_draft = SpeculativeAlgorithm.supports_target_verify_for_draft
    need_topk = SpeculativeAlgorithm.need_topk
    carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
    # ``Scheduler.init_overlap`` builds its relay with it.
    create_future_map = SpeculativeAlgorithm.create_future_map
    # What a decode node drafts from first.
    build_disagg_draft_input = SpeculativeAlgorithm.build_disagg_draft_input

    def supports_mixed_chunk(self) -> bool:
        return True

    def get_platform_worker_cls(self) -> type | None:
        return None

    def handle_server_args(self, server_args) -> None:
        """Resolve the speculative fields as SGLang does for DFLASH.

        Seam: ``arg_groups.speculative_hook._handle_dflash``. Its declarations reach the record
        only when an earlier step has declared something, so they are also written back here.
        """
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash

        window = served_window(server_args, load_draft_config(server_args))
        choose_draft_attention(server_args, window)
        try:
            _handle_dflash(server_args)
        except ValueError as refused:  # says DFLASH to a user who asked for HYPERDFLASH
            raise HyperDFlashConfigError(str(refused).replace("DFLASH", ALGORITHM)) from None
        resolved = resolving_view(server_args)
        for name in (
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "speculative_draft_attention_backend",
            "max_running_requests",
        ):
            setattr(server_args, name, getattr(resolved, name))
        if resolved.speculative_draft_load_format in (None, "auto"):
            # "auto" would fall back to pickled weights.
            server_args.speculative_draft_load_format = "safetensors"
        plain = resolved.kv_cache_dtype in PLAIN_KV
        if resolved.speculative_draft_kv_cache_dtype is None and not plain:
            # V4 resolves its own cache to fp8; drafts from fp8 K/V are accepted less often.
            server_args.speculative_draft_kv_cache_dtype = "bfloat16"
        check_window_attention(window, resolved.speculative_draft_attention_backend)
        server_args.speculative_draft_window_size = window
