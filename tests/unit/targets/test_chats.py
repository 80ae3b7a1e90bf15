"""Conversations against SGLang's own chat endpoint, token by token."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.entrypoints.openai import serving_chat, serving_deepseek_recipe
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from transformers import AutoTokenizer

from sglang_hyperdflash.targets.chats import Chat, DeepSeekChats, load_chats
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from tests.unit.targets.published_v4 import published_v4

V41 = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
PARAMETERS = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def called(name: str, arguments: str) -> dict:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I must add.",
    "tool_calls": [called("one", '{"a": 1}'), called("two", '{"b": "x y", "a": 2}')],
}
USERS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is <think> 2 + 2?"},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."},
    {"role": "user", "content": "And 1 + 2?"},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "two", "content": "second"},
    {"role": "tool", "tool_call_id": "one", "content": "first"},
]
LATER = [
    {"role": "assistant", "content": "It is 3.", "reasoning_content": "They say so."},
    {"role": "user", "content": "Thanks"},
]
WITH_TOOLS = [*USERS, CALL, *RESULTS, *LATER]
HURRIED = [*USERS, {"role": "developer", "content": "Hurry."}, USERS[1]]


@pytest.fixture(scope="module")
def folders(target_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    v4 = published_v4(root / "v4", target_dir)
    # A template in the folder of a V4 is ignored, by the server too.
    (v4 / "chat_template.jinja").write_text("{{ 'mine' }}")
    assert AutoTokenizer.from_pretrained(v4).chat_template == "{{ 'mine' }}"
    return {"v4": v4, "v41": published_v4(root / "v41", target_dir, V41), "tiny": target_dir}


def served(folder, chat: Chat) -> list[int]:
    """What SGLang's chat endpoint makes of a request with this conversation."""
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    manager = SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(folder),
        server_args=None,
        config_value=lambda name: None,
        model_config=SimpleNamespace(hf_config=config, get_default_sampling_params=dict),
        model_path=str(folder),
    )
    template = SimpleNamespace(
        chat_template_name=None,
        jinja_template_content_format="string",
        jinja_template_may_reorder_tool_results=False,
        python_chat_template=None,
        reasoning_config=None,
    )
    runtime = SimpleNamespace(default_chat_template_kwargs=None)
    options = dict(chat.options)
    effort = options.pop("reasoning_effort", None)
    body = {"model": "m", "messages": chat.messages, "chat_template_kwargs": options}
    body |= {"tools": chat.tools} if chat.tools else {}
    body |= {"reasoning_effort": effort} if effort is not None else {}
    with (
        mock.patch.object(serving_chat, "get_serving", lambda: runtime),
        mock.patch.object(serving_chat, "get_model", lambda: SimpleNamespace(revision=None)),
        mock.patch.object(serving_deepseek_recipe, "get_serving", lambda: runtime),
    ):
        serving = serving_chat.OpenAIServingChat(manager, template)
        request = ChatCompletionRequest(**json.loads(json.dumps(body)))
        return serving._process_messages(request, is_multimodal=False).prompt_ids


ASKED = [(name, {"thinking": on}) for name in ("v4", "v41", "tiny") for on in (False, True)]
EFFORTS = [("v4", "max"), ("v4", "none"), ("v41", "high")]
ASKED += [(name, {"reasoning_effort": effort}) for name, effort in EFFORTS]


@pytest.mark.parametrize("target, options", ASKED)
def test_a_prompt_is_what_the_server_tokenizes(folders, target, options):
    chats = load_chats(str(folders[target]))
    for messages, tools in (
        (USERS[1:2], None),
        (USERS, None),
        (USERS, TOOLS),
        (WITH_TOOLS, TOOLS),
        (WITH_TOOLS[:-2], TOOLS),
        (WITH_TOOLS, None),
        (HURRIED, None),
    ):
        chat = Chat(messages, tools, options)
        assert chats.prompt(chat, "here") == served(folders[target], chat), (messages, tools)


@pytest.mark.parametrize("target", ["v4", "v41"])
@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_is_what_later_prompts_hold_of_it(folders, target, thinking):
    """With tools nothing is dropped, so every answer stands in the last prompt as it was given."""
    chats = load_chats(str(folders[target]))
    whole = chats.prompt(Chat(WITH_TOOLS, TOOLS, {"thinking": thinking}), "here")
    for i in (2, 4, 7):
        chat = Chat(WITH_TOOLS[: i + 1], TOOLS, {"thinking": thinking})
        before = chats.prompt(chat.with_messages(WITH_TOOLS[:i]), "here")
        tokens = before + chats.answer(chat, "here")
        assert tokens[-1] == chats.tokenizer.eos_token_id
        assert whole[: len(tokens)] == tokens


@pytest.mark.parametrize("target", ["v4", "v41"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_reply_becomes_the_message_that_it_is(folders, target, thinking):
    chats = load_chats(str(folders[target]))
    for message in (CALL, LATER[0]):
        chat = Chat([*USERS, message], TOOLS, {"thinking": thinking})
        tokens = chats.answer(chat, "here")
        stop = {"type": "stop", "matched": tokens[-1]}
        reply = {"output_ids": tokens, "meta_info": {"finish_reason": stop}}
        read = chats.message(chat.with_messages(USERS), reply)
        assert read["content"] == (message["content"] or "")
        assert read.get("reasoning_content") == (message["reasoning_content"] if thinking else None)
        assert len(read.get("tool_calls", ())) == len(message.get("tool_calls", ()))
        assert chats.answer(chat.with_messages([*USERS, read]), "here") == tokens


def test_what_no_server_takes_is_refused(folders, target_dir):
    chats = load_chats(str(folders["v4"]))
    chats.check({"thinking": True, "reasoning_effort": "max"})
    result = {"role": "tool", "content": "a result of nothing"}
    with pytest.raises(BadRow, match=r"^data:3: .*tool_call_id"):
        chats.prompt(Chat([*USERS, result]), "data:3")
    for option in ({"think": True}, {"reasoning_effort": "great"}, {"reasoning_effort": 50}):
        with pytest.raises(HyperDFlashConfigError, match="the chat options"):
            chats.check(option)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    with pytest.raises(HyperDFlashConfigError, match="<think>"):
        DeepSeekChats("dsv4", tokenizer).prompt(Chat(USERS), "here")
