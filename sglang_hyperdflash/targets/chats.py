"""Conversations as an SGLang server of the target tokenizes them, and its answers as messages.

SGLang chooses the encoding by the architecture (``entrypoints/openai/chat_encoding.py``):
DeepSeek-V4 has its own encoder, even if its folder has a template; others need a Jinja template.
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
THINKING = ("thinking", "enable_thinking")  # two names of one option: DeepSeek's, and others'
DEEPSEEK = ("dsv4", "dsv41")  # SGLang's names of DeepSeek's encoders that are supported here


@dataclass(frozen=True)
class Chat:
    """A conversation or its beginning, with the names of OpenAI's API.

    Attributes:
        messages: each with ``role`` and ``content``, and optionally ``reasoning_content``,
            ``tool_calls`` and ``tool_call_id``.
        tools: the tool definitions of a request.
        options: the ``chat_template_kwargs`` of a request; for DeepSeek-V4 ``thinking`` and
            ``reasoning_effort``.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_messages(self, messages: list[Message]) -> Chat:
        """Return a chat of other messages with the same tools and options."""
        return replace(self, messages=messages)


class Chats(Protocol):
    """How one target encodes conversations.

    Attributes:
        tokenizer: the target's transformers tokenizer.
        vocab_size: the number of rows of the target's embedding.
    """

    tokenizer: Any
    vocab_size: int

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ``HyperDFlashConfigError`` if the target cannot encode chats with these options."""

    def prompt(self, chat: Chat, where: str) -> list[int]:
        """Return the tokens of a server's prompt, up to where the next answer begins.

        Args:
            where: the name of the conversation in errors.

        Raises:
            BadRow: a server would refuse the conversation.
        """

    def answer(self, chat: Chat, where: str) -> list[int]:
        """Return the tokens of the last message as the target writes it, with the end token.

        Raises:
            BadRow: as ``prompt``, or the answer cannot be separated from its prompt.
        """

    def message(self, chat: Chat, reply: Mapping[str, Any]) -> Message:
        """Return a server's ``/generate`` reply to ``chat`` as the message of later prompts."""


def load_chats(target: str) -> Chats:
    """Return the encoding of a target, which is a folder or a hub id.

    Raises:
        HyperDFlashConfigError: the target has no tokenizer, or not the one that its encoder needs.
        FileNotFoundError: the target has no ``config.json``.
    """
    from sglang.srt.entrypoints.openai.chat_encoding import resolve_chat_encoding_spec

    tokenizer, config = load_tokenizer(target), TargetFiles(target).config()
    hf_config = SimpleNamespace(
        architectures=config.get("architectures"), model_type=str(config.get("model_type"))
    )
    spec = resolve_chat_encoding_spec(hf_config=hf_config, tokenizer=tokenizer)
    vocab_size = text_fields(config).get("vocab_size", sys.maxsize)
    if spec in DEEPSEEK:
        return DeepSeekChats(spec, tokenizer, vocab_size)
    return TemplateChats(tokenizer, vocab_size)


class TemplateChats(Chats):
    """The encoding of a target with a Jinja template."""

    def __init__(self, tokenizer: Any, vocab_size: int = sys.maxsize) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse a tokenizer without a template; a template accepts any option."""
        if self.tokenizer.chat_template is None:
            raise HyperDFlashConfigError(
                f"the tokenizer of {getattr(self.tokenizer, 'name_or_path', 'the target')} has no "
                "chat template, which conversations need. Add a chat_template.jinja to the "
                "target's folder, or chat_template to its tokenizer_config.json."
            )

    def prompt(self, chat: Chat, where: str) -> list[int]:
        return self._ids(self._text(chat, where, prompt=True))

    def answer(self, chat: Chat, where: str) -> list[int]:
        prompt = self._text(chat.with_messages(chat.messages[:-1]), where, prompt=True)
        whole = self._text(chat, where, prompt=False)
        if not whole.startswith(prompt):
            raise BadRow(
                where,
                "the chat template renders an answer differently once it is there, so its tokens "
                "cannot be told apart",
            )
        answer = whole[len(prompt) :]
        thinks = all(chat.options.get(name, True) for name in THINKING)
        if thinks and (chat.messages[-1].get("reasoning_content") or "").strip() not in answer:
            raise BadRow(where, "the chat template drops the reasoning of an answer")
        ids, end = self._ids(answer), self.tokenizer.eos_token_id
        if end in ids:  # a template may add a newline, which the target never writes
            ids = ids[: len(ids) - ids[::-1].index(end)]
        return ids

    def message(self, chat: Chat, reply: Mapping[str, Any]) -> Message:
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
            summary = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"the target's chat template refuses the conversation: {summary}"
            raise BadRow(where, reason) from error


def _for_template(message: Message) -> Message:
    """Return a message as SGLang passes it to a template.

    The arguments of calls are objects, and missing content is an empty string.
    """
    message = {**message, "content": message.get("content") or ""}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call)}}
            for call in message["tool_calls"]
        ]
    return message


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call as an object; unchanged if they are not JSON."""
    arguments = call["function"].get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


class DeepSeekChats(Chats):
    """The encoding of DeepSeek-V4 and V4.1: SGLang's encoder, deepseek-recipe.

    Like a server, it drops the reasoning of earlier answers if no tools are given.

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
        """The function from a conversation of deepseek-recipe to token ids."""
        import deepseek_recipe as recipe

        kind = recipe.DeepseekV4Encoding if self.spec == "dsv4" else recipe.DeepseekV41Encoding
        encoding = kind().with_special_tokens(self._served.special_tokens)
        return encoding.with_tokenizer(self._served.tokenizer).encode

    def check(self, options: Mapping[str, Any]) -> None:
        self.prompt(Chat([{"role": "user", "content": ""}], options=options), "the chat options")

    def prompt(self, chat: Chat, where: str) -> list[int]:
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
            summary = str(error).rstrip(".")
            reason = f"DeepSeek-V4's encoder refuses the conversation: {summary}"
            raise BadRow(where, reason) from error

    def answer(self, chat: Chat, where: str) -> list[int]:
        import deepseek_recipe as recipe

        last, thinks = chat.messages[-1], self._thinks(chat)
        calls = [
            recipe.ToolCall(str(call.get("id")), call["function"]["name"], _as_text(call))
            for call in last.get("tool_calls") or ()
        ]
        # In thinking mode an answer without reasoning starts with an empty thought.
        reasoning = last.get("reasoning_content") or "" if thinks else None
        message = recipe.AssistantMessage(last.get("content") or "", reasoning, calls or None)
        # Text between special tokens is tokenized alone, so any prompt will do; with a tool no
        # reasoning is dropped.
        user, tool = recipe.UserMessage(""), recipe.ToolDefinition("any")
        before, after = (
            self._encode(recipe.Conversation(messages, thinking_mode=thinks, tools=[tool]))
            for messages in ([user], [user, message, user])
        )
        end = self._served.special_tokens.token(recipe.SpecialToken.Eos)
        end_id = self._served.hf_tokenizer.token_to_id(end)
        return after[len(before) : after.index(end_id, len(before)) + 1]

    def message(self, chat: Chat, reply: Mapping[str, Any]) -> Message:
        from sglang.srt.parser.deepseek_recipe_output import (
            DeepSeekRecipeOutputParser,
            whole_tool_calls,
        )

        parser = DeepSeekRecipeOutputParser(
            self._served,
            thinking_stage=self._served.parse_start(thinking=self._thinks(chat)),
            parse_tool_calls=bool(chat.tools),
        )
        parsed = parser.finish(reply["output_ids"], reply["meta_info"]["finish_reason"])
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if calls := whole_tool_calls(parsed):
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
        """Whether a server would think: SGLang's default, an effort, or the option."""
        from sglang.srt.environ import envs

        effort = chat.options.get("reasoning_effort")
        default = envs.SGLANG_DEFAULT_THINKING.get() if effort is None else effort != "none"
        return bool([default, *(chat.options[n] for n in chat.options if n in THINKING)][-1])


def _as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
