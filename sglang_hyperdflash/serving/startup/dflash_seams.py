"""What SGLang's DFLASH path assumes of layers, dtypes and sizes, one seam each."""

from __future__ import annotations

from sglang_hyperdflash import ALGORITHM, is_ours
from sglang_hyperdflash.seams import after

# Algorithms whose draft embeddings keep the draft's dtype; other plugins may add theirs.
own_dtype = {ALGORITHM}


@after(
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state"
    ":resolve_spec_aux_hidden_state_config",
    "4c68279a2634",
)
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


@after("sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs", "2fb8dbbf8d79")
def keep_draft_embedding_dtype(kwargs, self, forward_batch, *args, **rest):
    """Cast draft input embeddings to the draft's dtype, not always to bfloat16.

    A target that a client sends ``input_embeds`` to, and other algorithms, keep SGLang's cast.
    """
    ours = self.is_draft_worker and getattr(self.spec_algorithm, "name", None) in own_dtype
    if ours and forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
    return kwargs


@after("sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len", "a42a90b1f003")
def room_for_two_blocks(result: int) -> int:
    """Columns of ``req_to_token`` past the context for all that a round reserves.

    DFLASH reserves two blocks after the committed tokens. Without pages SGLang has columns for one
    block and four tokens, so blocks of more than eight rows would write into the next request's.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    if is_ours(get_spec().speculative_algorithm):
        return max(result, get_alloc_reserve_per_decode())
    return result


@after("sglang.srt.managers.tp_worker:TpModelWorker.get_worker_info", "12e6cdfc4b57")
def end_requests_early(info: tuple, self) -> tuple:
    """Shorter limits of requests where every round is a whole block.

    The last rounds pass a request's end by up to two blocks, which must not pass the context.
    """
    room = getattr(self, "rows_past_the_end", 0)
    return (*info[:4], info[4] - room, info[5] - room, *info[6:])
