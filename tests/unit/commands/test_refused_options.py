"""What SGLang refuses of an offline run is one line, not its traceback."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest

from sglang_hyperdflash.commands import engine, generate
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def test_an_option_that_no_engine_has_is_named():
    arguments = {"model_path": "x", "no_such_option": 1}
    with (
        pytest.raises(HyperDFlashConfigError, match=r"no_such_option.* --engine-args"),
        engine.quiet_engine(arguments, verbose=True),
    ):
        pass


def test_a_prompt_that_is_too_long_is_named_by_its_line():
    async def refuse(**_request):
        raise ValueError("Requested token count exceeds the model's maximum context length.")

    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [1] * 9)
    server = mock.Mock(async_generate=refuse)
    server.tokenizer_manager.tokenizer = tokenizer
    prompt = generate.Prompt(4, "digest", "long", [], [])
    args = SimpleNamespace(temperature=0, top_p=1, top_k=-1, min_p=0, max_new_tokens=8)
    with pytest.raises(HyperDFlashConfigError, match=r"line 5 \(9 tokens\) cannot be answered"):
        asyncio.run(generate.answer(server, prompt, args))
