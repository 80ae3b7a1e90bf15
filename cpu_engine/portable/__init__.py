"""A DeepSeek-V4 in plain torch, and the SGLang classes around it: any width, any device."""

# Spelled so that SGLang's tests for "DeepseekV4" in an architecture's name do not match: they
# would select V4's own chat encoding, cache layout and start-up rules.
PORTABLE_TARGET = "PortableDeepSeekV4ForCausalLM"
PORTABLE_NEXTN = "PortableDeepSeekV4ForCausalLMNextN"
