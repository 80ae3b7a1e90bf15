"""Conversations rendered by the target tokenizer's chat template, with one-line errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


class TemplateRefused(HyperDFlashConfigError):
    """The template refuses one conversation; ``reason`` says so without naming which."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}. Fix or remove it.")
        self.reason = reason


def check_template(tokenizer) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        HyperDFlashConfigError: it has none.
    """
    if getattr(tokenizer, "chat_template", "unknown") is None:
        raise HyperDFlashConfigError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', 'the target')} has no chat "
            "template, which conversations need. Add a chat_template.jinja to the target's folder, "
            "or chat_template to its tokenizer_config.json."
        )


def render(
    tokenizer,
    messages: Sequence[dict[str, str]],
    *,
    prompt: bool,
    where: str = "a conversation",
    **template: Any,
) -> str:
    """The template's text.

    Args:
        prompt: end where the next answer begins. where: names the conversation in errors.
        template: the template's own arguments (``thinking=True``).

    Raises:
        HyperDFlashConfigError: there is no template. TemplateRefused: it refuses the conversation.
    """
    check_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **template
        )
    except (TemplateError, ValueError, TypeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"the target's chat template refuses the conversation: {said}"
        raise TemplateRefused(where, reason) from error
