"""What an exchange is, and which half of the problems it belongs to.

An exchange is a problem (drawn from a family), put into words, with its computed answer. The
problem has a canonical form, its ``key``, which leaves the words out. A hash of family and key
decides whether the problem is held out, so no phrasing of a held-out problem is ever trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

Message = dict[str, str]

HELD_OUT_MODULUS = 8
FIRST_HELD_OUT_SEED = 1000
ANSWER = "Answer: "
# The texts that a problem is put into, and pairs of a function's purpose and body; names in braces
# are filled in.
WORDINGS = json.loads((Path(__file__).parent / "wordings.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Exchange:
    """One conversation that ends with the assistant's right answer.

    Attributes:
        family: name of the family that made it.
        key: canonical form of the problem; exchanges of one key differ in wording only.
        messages: ``{"role", "content"}``, users and assistants in turn, the assistant last.
        answer: what a right reply says at its end, in the form that the family's ``read`` gives.
        header: for code to complete, the line that the reply continues; else empty.
    """

    family: str
    key: str
    messages: tuple[Message, ...]
    answer: str
    header: str = ""

    @property
    def prompt(self) -> list[Message]:
        """The conversation up to the last reply, to be answered by a model."""
        return [dict(message) for message in self.messages[:-1]]

    @property
    def reply(self) -> str:
        """The generator's own last reply."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Draft:
    """What a family's ``make`` returns; see :class:`Exchange` for the fields."""

    key: str
    turns: tuple[str, ...]
    answer: str
    header: str = ""


@dataclass(frozen=True)
class Family:
    """A kind of problem.

    Attributes:
        name: short, stable; part of the hash that holds problems out.
        make: draws one problem and one wording of it from a random stream.
        read: finds the final answer in a reply (``None`` when there is none). It gets the
            exchange too, for what the prompt has fixed (the line that code continues).
    """

    name: str
    make: Callable[[Random], Draft]
    read: Callable[[str, Exchange], str | None]

    def draw(self, rng: Random, *, held_out: bool) -> Exchange:
        """Draw problems until one belongs to the wanted half."""
        while True:
            draft = self.make(rng)
            if is_held_out(self.name, draft.key) == held_out:
                return self._exchange(draft)

    def is_right(self, exchange: Exchange, reply: str) -> bool:
        """Whether the reply's final answer is the exchange's."""
        return self.read(reply, exchange) == exchange.answer

    def _exchange(self, draft: Draft) -> Exchange:
        roles = ("user", "assistant")
        messages = tuple(
            {"role": roles[i % 2], "content": content} for i, content in enumerate(draft.turns)
        )
        return Exchange(self.name, draft.key, messages, draft.answer, draft.header)


def is_held_out(family: str, key: str) -> bool:
    """Whether a problem is held out: one in eight, by a hash of its canonical form alone."""
    digest = hashlib.sha256(f"{family}\x00{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_MODULUS == 0


def wording(rng: Random, problem: str, **values: object) -> str:
    """One of the texts of ``WORDINGS[problem]``, drawn at random and filled in."""
    return rng.choice(WORDINGS[problem]).format(**values)


def worked(steps: Sequence[str], answer: str) -> str:
    """A reply: the working, one line per step, then the answer on its own line."""
    return "\n".join([*steps, ANSWER + answer])


def final_line(reply: str) -> str | None:
    """What follows the last ``Answer:``, to the end of its line."""
    _, found, tail = reply.rpartition(ANSWER.strip())
    return tail.strip().split("\n")[0].strip().rstrip(".") if found else None


def read_number(reply: str, _exchange: Exchange | None = None) -> str | None:
    """The first whole number of the final answer, whatever unit follows it."""
    line = final_line(reply)
    number = re.search(r"-?\d+", line) if line else None
    return str(int(number.group())) if number else None


def read_line(reply: str, _exchange: Exchange | None = None) -> str | None:
    """The final answer as words, whatever its case and spaces."""
    line = final_line(reply)
    return " ".join(line.lower().split()) if line else None


def read_list(reply: str, _exchange: Exchange | None = None) -> str | None:
    """The final answer as a list, split at commas; its order counts."""
    line = final_line(reply)
    return ", ".join(part.strip().lower() for part in line.split(",")) if line else None


def read_text(reply: str, _exchange: Exchange | None = None) -> str | None:
    """The whole reply without spaces at its lines' ends, where the answer is a text."""
    return "\n".join(line.rstrip() for line in reply.strip().split("\n")) or None
