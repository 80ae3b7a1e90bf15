"""A DeepSeek-V4 in plain torch, and the SGLang classes around it: any width, any device."""

# Spelled so that SGLang's tests for "DeepseekV4" in an architecture's name do not match: they
# would select V4's own chat encoding, cache layout and start-up rules.
PORTABLE_TARGET = "PortableDeepSeekV4ForCausalLM"
PORTABLE_NEXTN = "PortableDeepSeekV4ForCausalLMNextN"


def choose_arguments(server_args, hf_config) -> dict[str, str]:
    """Dtype or attention backend of a portable target, where the user named none.

    On a CPU fp32: in the checkpoint's bf16 a near-tie rounds differently in a 7-row and a 1-row
    pass. On CUDA Triton, which has sinks and any dtype, and bf16: fp32 would be multiplied as TF32.
    Seam: ``register_model_override``.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.runtime_context import get_platform

    resolved = resolving_view(server_args)
    chosen = {"dtype": "float32"} if resolved.device == "cpu" else {}
    if get_platform().is_cuda:
        chosen = {"dtype": "bfloat16", "attention_backend": "triton"}
    return {k: v for k, v in chosen.items() if getattr(resolved, k) in (None, "auto")}
