"""GPU tests share the engine tests' servers and prompts."""

from tests.engine.conftest import own_prompts, servers, tokenizer

__all__ = ["own_prompts", "servers", "tokenizer"]
