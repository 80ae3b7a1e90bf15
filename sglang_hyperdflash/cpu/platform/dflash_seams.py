"""What SGLang's DFLASH path asks of a GPU, replaced on the CPU platform."""

from __future__ import annotations

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import after, around, replace


@around("sglang.srt.arg_groups.speculative_hook:_handle_dflash", "12b1b03eca9f")
def attention_data_parallelism(original, server_args):
    """Let attention data parallelism through as on CUDA: ranks gather over gloo here."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    device = resolving_view(server_args).device
    declare_resolution(server_args, "hyperdflash", device="cuda")
    try:
        return original(server_args)
    finally:
        declare_resolution(server_args, "hyperdflash", device=device)


@after("sglang.srt.models.dflash:DFlashAttention.__init__", "a3f49ffdee1f")
def no_triton_rope(result, self, *args, **kwargs):
    """Use plain q/k norm and RoPE in draft layers; the fused ones are a Triton kernel."""
    self.use_table_qk_norm_rope = False


@after("sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.__init__", "94c547064b01")
def draft_kv_of_all_layers(result, self, *args, **kwargs):
    """Project the draft K/V of all layers at once, as on a GPU, in a third of the operations."""
    self._use_fused_kv_materialize = True
    self._init_fused_kv_helper()


@after("sglang.srt.speculative.dflash_utils:is_dflash_sampling_verify_available", "9a66c4eba0f8")
def sampling_masks(available):
    """Let requests ask for sampling masks: HYPERDFLASH needs no kernel of SGLang's to be exact."""
    from sglang.srt.runtime_context import get_spec

    return available or is_ours(get_spec().speculative_algorithm)


@replace("sglang.srt.mem_cache.allocation:get_last_loc", "b14bba7a1b96")
def last_slots(req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    """Return the last slot of each request, after which its page continues; -1 without one."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
