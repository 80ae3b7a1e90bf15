"""Conversations as an SGLang server of the target tokenizes them, and its answers as messages.

SGLang decides by the architecture (``entrypoints/openai/chat_encoding.py``): DeepSeek-V4 has an
encoder of its own, whatever template lies in its folder; other targets need a Jinja template.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

from jinja2 import TemplateError

from sglang_hyperdflash.targets.files import TargetFiles, load_tokenizer
from sglang_hyperdflash.targets.kinds import text_fields
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError

Message = dict[str, Any]
THINKING = ("thinking", "enable_thinking")  # names of one option; the second is other templates'
DEEPSEEK = ("dsv4", "dsv41")  # SGLang's names of the encoders that are supported here


@dataclass(frozen=True)
class Chat:
    """A conversation or its beginning, with the names of OpenAI's API.

    Attributes:
        messages: each with ``role`` and ``content`` and, where they apply, ``reasoning_content``,
            ``tool_calls``, ``tool_call_id``.
        tools: the definitions that a request would carry. options: its ``chat_template_kwargs``;
            for DeepSeek-V4 ``thinking`` and ``reasoning_effort``.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_messages(self, messages: list[Message]) -> Chat:
        """The same tools and options for other messages."""
        return replace(self, messages=messages)


class Chats(Protocol):
    """How one target encodes conversations.

    Attributes:
        tokenizer: the target's, of transformers. vocab_size: rows of its embedding.
    """

    tokenizer: Any
    vocab_size: int

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse a target that can encode no conversation, or none with these options.

        Raises:
            HyperDFlashConfigError: what is missing, or unknown.
        """

    def prompt(self, chat: Chat, where: str) -> list[int]:
        """What a server tokenizes of the messages, up to where the next answer begins.

        Args:
            where: names the conversation in errors.

        Raises:
            BadRow: a server would refuse it.
        """

    def answer(self, chat: Chat, where: str) -> list[int]:
        """The last message as the target would write it after the others, end token included.

        Raises:
            BadRow: as ``prompt``, or the answer cannot be told from its prompt.
        """

    def message(self, chat: Chat, reply: Mapping[str, Any]) -> Message:
        """A server's reply from ``/generate`` as the message that later prompts hold.

        Args:
            chat: what was asked.
        """


def load_chats(target: str) -> Chats:
    """The encoding of a target: folder or hub id.

    Raises:
        HyperDFlashConfigError: it has no tokenizer, or not one that its encoder needs.
        FileNotFoundError: it has no ``config.json``.
    """
    from sglang.srt.entrypoints.openai.chat_encoding import resolve_chat_encoding_spec

    tokenizer, config = load_tokenizer(target), TargetFiles(target).config()
    asked = SimpleNamespace(
        architectures=config.get("architectures"), model_type=str(config.get("model_type"))
    )
    spec = resolve_chat_encoding_spec(hf_config=asked, tokenizer=tokenizer)
    known = tokenizer, text_fields(config).get("vocab_size", sys.maxsize)
    return DeepSeekChats(spec, *known) if spec in DEEPSEEK else TemplateChats(*known)


class TemplateChats:
    """A target with a Jinja template."""

    def __init__(self, tokenizer: Any, vocab_size: int = sys.maxsize) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse a tokenizer without a template; a template takes any option."""
        if self.tokenizer.chat_template is None:
            raise HyperDFlashConfigError(
                f"the tokenizer of {getattr(self.tokenizer, 'name_or_path', 'the target')} has no "
                "chat template, which conversations need. Add a chat_template.jinja to the "
                "target's folder, or chat_template to its tokenizer_config.json."
            )

    def prompt(self, chat: Chat, where: str) -> list[int]:
        """See :class:`Chats`."""
        return self._ids(self._text(chat, where, prompt=True))

    def answer(self, chat: Chat, where: str) -> list[int]:
        """See :class:`Chats`."""
        before = self._text(chat.with_messages(chat.messages[:-1]), where, prompt=True)
        after = self._text(chat, where, prompt=False)
        if not after.startswith(before):
            raise BadRow(
                where,
                "the chat template renders an answer differently once it is there, so its tokens "
                "cannot be told apart",
            )
        thinks = all(chat.options.get(name, True) for name in THINKING)
        if (
            thinks
            and (chat.messages[-1].get("reasoning_content") or "").strip()
            not in after[len(before) :]
        ):
            raise BadRow(where, "the chat template drops the reasoning of an answer")
        ids, end = self._ids(after[len(before) :]), self.tokenizer.eos_token_id
        if end in ids:  # a template may go on, with a newline that the target never writes
            ids = ids[: len(ids) - ids[::-1].index(end)]
        return ids

    def message(self, chat: Chat, reply: Mapping[str, Any]) -> Message:
        """See :class:`Chats`."""
        return {"role": "assistant", "content": reply["text"]}

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _text(self, chat: Chat, where: str, *, prompt: bool) -> str:
        self.check(chat.options)
        try:
            return self.tokenizer.apply_chat_template(
                [_for_template(message) for message in chat.messages],
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **chat.options,
            )
        except (TemplateError, ValueError, TypeError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"the target's chat template refuses the conversation: {said}"
            raise BadRow(where, reason) from error


def _for_template(message: Message) -> Message:
    """A message as SGLang gives it to a template: arguments of calls are objects, no content is
    an empty one.
    """
    message = {**message, "content": message.get("content") or ""}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call)}}
            for call in message["tool_calls"]
        ]
    return message


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a tool call as an object; as they are where they are no JSON."""
    given = call["function"].get("arguments")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


class DeepSeekChats:
    """DeepSeek-V4 and V4.1: SGLang's encoder, deepseek-recipe.

    As a server does, it drops the reasoning of earlier answers where no tools are given.

    Args:
        spec: SGLang's name of the encoding.
    """

    def __init__(self, spec: str, tokenizer: Any, vocab_size: int = sys.maxsize) -> None:
        self.tokenizer, self.vocab_size, self.spec = tokenizer, vocab_size, spec

    @cached_property
    def _served(self) -> Any:
        """SGLang's encoder; raises ``HyperDFlashConfigError`` if the tokenizer lacks its tokens."""
        from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

        try:
            served = DeepSeekRecipe.from_hf_tokenizer(self.spec, self.tokenizer)
            served.encode({"messages": [{"role": "user", "content": ""}], "thinking": True})
        except (ImportError, ValueError, RuntimeError) as error:
            raise HyperDFlashConfigError(
                f"the tokenizer of {getattr(self.tokenizer, 'name_or_path', 'the target')} cannot "
                f"encode DeepSeek-V4's conversations: {error}. Use the tokenizer files that "
                "DeepSeek publishes, with deepseek-recipe installed."
            ) from error
        return served

    @cached_property
    def _encode(self) -> Callable[[Any], list[int]]:
        """Token ids of one of deepseek-recipe's own conversations."""
        import deepseek_recipe as recipe

        kind = recipe.DeepseekV4Encoding if self.spec == "dsv4" else recipe.DeepseekV41Encoding
        encoding = kind().with_special_tokens(self._served.special_tokens)
        return encoding.with_tokenizer(self._served.tokenizer).encode

    def check(self, options: Mapping[str, Any]) -> None:
        """See :class:`Chats`."""
        self.prompt(Chat([{"role": "user", "content": ""}], options=options), "the chat options")

    def prompt(self, chat: Chat, where: str) -> list[int]:
        """See :class:`Chats`."""
        from sglang.srt.parser.deepseek_recipe_renderer import parse_effort_budget

        messages = [{**m, "content": m.get("content") or ""} for m in chat.messages]
        body = {"messages": messages, "thinking": self._thinks(chat)}
        if chat.tools:
            body["tools"] = [{"type": "function", **tool} for tool in chat.tools]
            body["tool_choice"] = "auto"
        served, effort, budget = self._served, chat.options.get("reasoning_effort"), None
        try:
            unknown = ", ".join(sorted(chat.options.keys() - {*THINKING, "reasoning_effort"}))
            if unknown:
                raise ValueError(f"expected thinking or reasoning_effort, found {unknown}")
            if isinstance(effort, int | float):
                if self.spec == "dsv4":
                    raise ValueError(f"reasoning_effort must be a named tier, found {effort}")
                budget = parse_effort_budget(effort)
            elif effort not in (None, "none"):
                body["reasoning_effort"] = effort
            return served.encode(body, effort_budget=budget)
        except (ValueError, KeyError, TypeError) as error:
            said = str(error).rstrip(".")
            reason = f"DeepSeek-V4's encoder refuses the conversation: {said}"
            raise BadRow(where, reason) from error

    def answer(self, chat: Chat, where: str) -> list[int]:
        """See :class:`Chats`."""
        import deepseek_recipe as recipe

        said, thinks = chat.messages[-1], self._thinks(chat)
        calls = [
            recipe.ToolCall(str(call.get("id")), call["function"]["name"], _as_text(call))
            for call in said.get("tool_calls") or ()
        ]
        # Without reasoning a target that thinks closes an empty thought.
        reasoning = said.get("reasoning_content") or "" if thinks else None
        message = recipe.AssistantMessage(said.get("content") or "", reasoning, calls or None)
        # A text between special tokens is tokenized alone, so that any prompt serves; where there
        # are tools no reasoning is dropped.
        user, tool = recipe.UserMessage(""), recipe.ToolDefinition("any")
        before, after = (
            self._encode(recipe.Conversation(messages, thinking_mode=thinks, tools=[tool]))
            for messages in ([user], [user, message, user])
        )
        end = self._served.special_tokens.token(recipe.SpecialToken.Eos)
        end_id = self._served.hf_tokenizer.token_to_id(end)
        return after[len(before) : after.index(end_id, len(before)) + 1]

    def message(self, chat: Chat, reply: Mapping[str, Any]) -> Message:
        """See :class:`Chats`."""
        from sglang.srt.parser.deepseek_recipe_output import (
            DeepSeekRecipeOutputParser,
            whole_tool_calls,
        )

        parser = DeepSeekRecipeOutputParser(
            self._served,
            thinking_stage=self._served.parse_start(thinking=self._thinks(chat)),
            parse_tool_calls=bool(chat.tools),
        )
        said = parser.finish(reply["output_ids"], reply["meta_info"]["finish_reason"])
        message: Message = {"role": "assistant", "content": said.content}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        calls = whole_tool_calls(said)
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{call.index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message

    def _thinks(self, chat: Chat) -> bool:
        """As a request does: SGLang's default without an option, on with an effort."""
        from sglang.srt.environ import envs

        effort = chat.options.get("reasoning_effort")
        given = envs.SGLANG_DEFAULT_THINKING.get() if effort is None else effort != "none"
        return bool([given, *(chat.options[n] for n in chat.options if n in THINKING)][-1])


def _as_text(call: Mapping[str, Any]) -> str:
    given = call["function"].get("arguments")
    if isinstance(given, str):
        return given
    return json.dumps(given, ensure_ascii=False, separators=(",", ":"))
