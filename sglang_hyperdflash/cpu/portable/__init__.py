"""A DeepSeek-V4 of any size in plain torch, and its SGLang classes, for any device."""

# SGLang selects V4's chat encoding, cache layout and start-up rules by "DeepseekV4" in an
# architecture's name, which these spellings avoid.
PORTABLE_TARGET = "PortableDeepSeekV4ForCausalLM"


def choose_arguments(server_args, hf_config) -> dict[str, str]:
    """Choose a portable target's dtype and attention backend if the user named none.

    A CPU gets fp32, because in bf16 a near-tie rounds differently in a 7-row and a 1-row pass. CUDA
    gets Triton, which has sinks and any dtype, and bf16, because fp32 would be multiplied as TF32.
    Seam: ``register_model_override``.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.runtime_context import get_platform

    resolved = resolving_view(server_args)
    chosen = {"dtype": "float32"} if resolved.device == "cpu" else {}
    if get_platform().is_cuda:
        chosen = {"dtype": "bfloat16", "attention_backend": "triton"}
    return {n: value for n, value in chosen.items() if getattr(resolved, n) in (None, "auto")}
