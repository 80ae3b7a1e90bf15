"""Conversations with an OpenAI-compatible SGLang server, with what was drafted."""

import queue
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests

from eval.errors import one_line
from eval.histograms import add_histograms
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import key_headers, reason_of

TIMEOUT = 1800.0  # seconds of one request


class Unanswered(requests.RequestException):
    """A running server refused a request, or its answer lacks a field."""


@dataclass
class Answer:
    """All turns of one conversation; the counters are sums over the turns."""

    output_ids: list[list[int]] = field(default_factory=list)  # token ids of every turn
    texts: list[str] = field(default_factory=list)  # of every turn
    seconds: float = 0.0  # wall clock
    correct_drafts: int = 0
    verify_rounds: int = 0
    histogram: list[int] = field(default_factory=list)  # entry i: rounds with i accepted drafts
    # Entry w counts the rounds of width w; empty where every round had every draft.
    widths: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """How every turn is answered."""

    temperature: float
    max_new_tokens: int
    template_args: dict[str, Any] = field(default_factory=dict)  # of the chat template


def post(address: str, payload: dict[str, Any]) -> requests.Response:
    """The reply to a JSON request with the key; raises ``requests.RequestException``."""
    return requests.post(address, json=payload, timeout=TIMEOUT, headers=key_headers())


def chat(
    url: str, messages: list[dict[str, str]], sampling: Sampling, **extensions: bool
) -> dict[str, Any]:
    """One chat completion's JSON; ``extensions`` are SGLang's own fields of the request.

    Raises ``Unanswered`` with the server's reason, another ``RequestException`` where it died.
    """
    payload = {
        "model": "default",
        "messages": messages,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "chat_template_kwargs": sampling.template_args,
        **extensions,
    }
    reply = post(f"{url}/v1/chat/completions", payload)
    if not reply.ok:
        reason = " ".join(reason_of(reply.text).split())[:500] or "no reason given"
        raise Unanswered(f"{url} refused with {reply.status_code}: {reason}")
    return reply.json()


def messages_before(turns: list[str], texts: list[str], turn: int) -> list[dict[str, str]]:
    """The messages up to and with user turn ``turn`` (from 0); ``texts``: the answers before it."""
    messages = []
    for i in range(turn):
        messages.append({"role": "user", "content": turns[i]})
        messages.append({"role": "assistant", "content": texts[i]})
    return [*messages, {"role": "user", "content": turns[turn]}]


def converse(url: str, turns: list[str], sampling: Sampling) -> Answer:
    """Ask the turns one after another, each after the answers to the turns before it.

    Raises as :func:`chat`, and ``Unanswered`` for an aborted answer or one without token ids.
    """
    answer = Answer()
    extensions = {"return_spec_tokens_details": True, "return_output_ids_in_sglext": True}
    for i in range(len(turns)):
        messages = messages_before(turns, answer.texts, i)
        started = time.perf_counter()
        completion = chat(url, messages, sampling, **extensions)
        answer.seconds += time.perf_counter() - started
        choice, extension = completion["choices"][0], completion.get("sglext") or {}
        output_ids = extension.get("output_ids")
        if choice.get("finish_reason") == "abort":
            raise Unanswered(f"{url} aborted the answer")
        if not output_ids:  # an empty answer is [[]]
            raise Unanswered(
                f"{url} answered without sglext.output_ids, so tokens cannot be counted or "
                "compared. Expected an SGLang server, not a proxy."
            )
        details = extension.get("spec_tokens_details") or {}
        correct_drafts, verify_rounds, histogram = counters(details)
        answer.output_ids.append(output_ids[0])
        answer.texts.append(choice["message"]["content"] or "")
        answer.correct_drafts += correct_drafts
        answer.verify_rounds += verify_rounds
        answer.histogram = add_histograms([answer.histogram, histogram])
        answer.widths = add_histograms([answer.widths, details.get("spec_cap_lens_histogram", [])])
    return answer


def converse_all(
    url: str, conversations: list[list[str]], sampling: Sampling, concurrency: int
) -> tuple[list[Answer], float]:
    """The answers to all conversations in their order, and the wall seconds.

    ``concurrency`` conversations are in flight. The threads are daemons: Ctrl-C does not wait for
    unfinished answers. Raises as :func:`converse`, with the number (from 1) of a refused prompt;
    after an error no further conversation is begun.
    """
    waiting = deque(enumerate(conversations))
    finished: queue.SimpleQueue[tuple[int, Answer | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        with suppress(IndexError):  # of popleft: none is left
            while True:
                i, turns = waiting.popleft()
                try:
                    finished.put((i, converse(url, turns, sampling)))
                except BaseException as error:
                    waiting.clear()  # before another thread takes the next conversation
                    finished.put((i, error))

    started = time.perf_counter()
    for _ in range(min(concurrency, len(conversations))):
        threading.Thread(target=work, daemon=True).start()
    answers: dict[int, Answer] = {}
    try:
        while len(answers) < len(conversations):
            i, answer = finished.get()
            if isinstance(answer, Unanswered):
                raise Unanswered(f"prompt {i + 1}: {one_line(answer)}") from answer
            if isinstance(answer, BaseException):
                raise answer
            answers[i] = answer
    finally:
        waiting.clear()
    seconds = time.perf_counter() - started
    return [answers[i] for i in range(len(conversations))], seconds
