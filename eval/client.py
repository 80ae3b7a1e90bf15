"""One conversation with an OpenAI-compatible SGLang server, with what was drafted."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from eval.errors import one_line
from sglang_hyperdflash.tools.acceptance import add_histograms
from sglang_hyperdflash.tools.server_process import key_headers, reason_of


class Unanswered(requests.RequestException):
    """A running server refused a request, or its answer lacks a field."""


@dataclass
class Answer:
    """All turns of one conversation: tokens and text of every turn, wall seconds, counters.

    histogram: entry i counts the rounds with i accepted drafts. widths: entry w counts the rounds
    of width w; empty where every round had every draft.
    """

    output_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    correct_drafts: int = 0
    verify_rounds: int = 0
    histogram: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """How every turn is answered; ``timeout`` in seconds."""

    temperature: float
    max_new_tokens: int
    template_args: dict[str, Any] = field(default_factory=dict)
    timeout: float = 1800.0


def chat(url: str, messages: list[dict], sampling: Sampling, **more: Any) -> dict[str, Any]:
    """One chat completion's JSON.

    Raises:
        Unanswered: the server refused; the message holds its reason.
        requests.RequestException: the server died.
    """
    payload = {
        "model": "default",
        "messages": messages,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "chat_template_kwargs": sampling.template_args,
        **more,
    }
    options = {"json": payload, "timeout": sampling.timeout, "headers": key_headers()}
    reply = requests.post(f"{url}/v1/chat/completions", **options)
    if not reply.ok:
        reason = " ".join(reason_of(reply.text).split())[:500] or "no reason given"
        raise Unanswered(f"{url} refused with {reply.status_code}: {reason}")
    return reply.json()


def messages_before(turns: list[str], texts: list[str], turn: int) -> list[dict[str, str]]:
    """The conversation up to and with user turn ``turn`` (from 0), given the answers before it."""
    messages = []
    for i in range(turn):
        messages.append({"role": "user", "content": turns[i]})
        messages.append({"role": "assistant", "content": texts[i]})
    return [*messages, {"role": "user", "content": turns[turn]}]


def converse(url: str, turns: list[str], sampling: Sampling) -> Answer:
    """Ask the turns one after another, each seeing the answers before it.

    Raises:
        Unanswered: the server refused or aborted, or did not say which tokens it wrote.
        requests.RequestException: the server died.
    """
    answer = Answer()
    asked = {"return_spec_tokens_details": True, "return_output_ids_in_sglext": True}
    for i in range(len(turns)):
        messages = messages_before(turns, answer.texts, i)
        started = time.perf_counter()
        content = chat(url, messages, sampling, **asked)
        answer.seconds += time.perf_counter() - started
        extension = content.get("sglext") or {}
        details = extension.get("spec_tokens_details") or {}
        written = extension.get("output_ids")
        if content["choices"][0].get("finish_reason") == "abort":
            raise Unanswered(f"{url} aborted the answer")
        if not written:  # an empty answer is [[]]
            raise Unanswered(
                f"{url} answered without sglext.output_ids, so tokens cannot be counted or "
                "compared. Expected an SGLang server, not a proxy."
            )
        answer.output_ids.append(written[0])
        answer.correct_drafts += int(details.get("spec_num_correct_drafts", 0))
        answer.verify_rounds += int(details.get("spec_verify_ct", 0))
        histogram = details.get("spec_correct_drafts_histogram", [])
        answer.histogram = add_histograms([answer.histogram, histogram])
        answer.widths = add_histograms([answer.widths, details.get("spec_cap_lens_histogram", [])])
        answer.texts.append(content["choices"][0]["message"]["content"] or "")
    return answer


def converse_all(
    url: str, conversations: list[list[str]], sampling: Sampling, concurrency: int
) -> tuple[list[Answer], float]:
    """Every conversation, ``concurrency`` in flight; answers in order and wall seconds.

    The threads are daemons: Ctrl-C does not wait for unfinished answers.

    Raises:
        Unanswered: the server refused a prompt, whose number (from 1) the message holds.
        requests.RequestException: the server died. After either no other conversation is begun.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, Answer | BaseException]] = queue.SimpleQueue()
    for i in range(len(conversations)):
        waiting.put(i)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((i, converse(url, conversations[i], sampling)))
            except BaseException as error:
                stop.set()  # here, before another thread takes the next conversation
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
        stop.set()
    seconds = time.perf_counter() - started
    return [answers[i] for i in range(len(conversations))], seconds
