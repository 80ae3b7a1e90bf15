"""The reference route: an SGLang CPU platform and a portable DeepSeek-V4 target in plain torch."""
