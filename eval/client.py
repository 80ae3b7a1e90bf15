"""One conversation against an OpenAI-compatible SGLang server, with what was drafted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import requests

from sglang_hyperdflash.tools.acceptance import add_histograms


@dataclass
class Answer:
    """All turns of one conversation: tokens of every turn, wall seconds, speculative counters."""

    output_ids: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    correct_drafts: int = 0
    verify_rounds: int = 0
    histogram: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Output tokens of all turns."""
        return sum(map(len, self.output_ids))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sampling:
    """How every turn is answered."""

    temperature: float
    max_new_tokens: int
    template_args: dict[str, Any] = field(default_factory=dict)
    timeout: float = 1800.0


def converse(url: str, turns: list[str], sampling: Sampling) -> Answer:
    """Ask the turns one after another, each seeing the answers before it.

    Raises:
        requests.RequestException: the server refused or died.
    """
    answer, messages = Answer(), []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        payload = {
            "model": "default",
            "messages": messages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "return_spec_tokens_details": True,
            "return_output_ids_in_sglext": True,
            "chat_template_kwargs": sampling.template_args,
        }
        started = time.perf_counter()
        reply = requests.post(f"{url}/v1/chat/completions", json=payload, timeout=sampling.timeout)
        answer.seconds += time.perf_counter() - started
        reply.raise_for_status()
        content = reply.json()
        extension = content.get("sglext") or {}
        details = extension.get("spec_tokens_details") or {}
        answer.output_ids.append((extension.get("output_ids") or [[]])[0])
        answer.correct_drafts += int(details.get("spec_num_correct_drafts", 0))
        answer.verify_rounds += int(details.get("spec_verify_ct", 0))
        histogram = details.get("spec_correct_drafts_histogram", [])
        answer.histogram = add_histograms([answer.histogram, histogram])
        text = content["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": text})
    return answer


def converse_all(
    url: str, conversations: list[list[str]], sampling: Sampling, concurrency: int
) -> tuple[list[Answer], float]:
    """Every conversation, ``concurrency`` in flight; answers in order and wall seconds."""
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda turns: converse(url, turns, sampling), conversations))
    return answers, time.perf_counter() - started
