"""What an exchange is, and which half of the problems it belongs to.

An exchange is a problem drawn from a family, put into words, with its computed answer. The problem
has a canonical form, its ``key``, which leaves the words out. A hash of family and key decides
whether the problem is held out, so no phrasing of a held-out problem is ever trained on.
"""

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
    """What a family's ``make`` returns; :class:`Exchange` documents the fields."""

    key: str
    turns: tuple[str, ...]
    answer: str
    header: str = ""


@dataclass(frozen=True)
class Family:
    """A kind of problem.

    Attributes:
        name: short and stable; part of the hash that holds problems out.
        make: draws one problem and one wording of it from a random stream.
        read: finds the final answer in a reply, ``None`` without one. It gets the exchange too, for
            what the prompt has fixed (the line that code continues).
    """

    name: str
    make: Callable[[Random], Draft]
    read: Callable[[str, Exchange], str | None]

    def draw(self, rng: Random, *, held_out: bool) -> Exchange:
        """Draw problems until one belongs to the wanted half."""
        draft = self.make(rng)
        while is_held_out(self.name, draft.key) != held_out:
            draft = self.make(rng)
        roles = ("user", "assistant")
        messages = ({"role": roles[i % 2], "content": turn} for i, turn in enumerate(draft.turns))
        return Exchange(self.name, draft.key, tuple(messages), draft.answer, draft.header)

    def is_right(self, exchange: Exchange, reply: str) -> bool:
        """Return whether the reply's final answer is the exchange's."""
        return self.read(reply, exchange) == exchange.answer


def is_held_out(family: str, key: str) -> bool:
    """Return whether a problem is held out: one in eight, by a hash of its canonical form alone."""
    digest = hashlib.sha256(f"{family}\x00{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_MODULUS == 0


def wording(rng: Random, problem: str, **values: object) -> str:
    """Draw one of the texts of ``WORDINGS[problem]`` and fill it in."""
    return rng.choice(WORDINGS[problem]).format(**values)


def worked(key: str, question: str, steps: Sequence[str], answer: str) -> Draft:
    """Return a problem whose reply is one line per step, then the answer on its own line."""
    reply = "\n".join([*steps, ANSWER + answer])
    return Draft(key, (question, reply), answer.strip('"').lower())


def final_line(reply: str) -> str:
    """Return what follows the last ``Answer:``, to the end of its line; empty without one."""
    _, marker, tail = reply.rpartition(ANSWER.strip())
    return tail.strip().split("\n")[0].strip().rstrip(".") if marker else ""


def reader(normalise: Callable[[str], str]) -> Callable[[str, Exchange], str | None]:
    """Return a ``read``: it gives the final answer in a normal form, None if that is empty."""
    return lambda reply, _exchange: normalise(final_line(reply)) or None


# The first whole number, whatever unit follows it.
read_int = reader(lambda line: next((str(int(n)) for n in re.findall(r"-?\d+", line)), ""))
# Words, whatever their case and spaces.
read_line = reader(lambda line: " ".join(line.lower().split()))
# A value without quotes.
read_value = reader(lambda line: line.strip('"').lower())
# A list, split at commas; its order counts.
read_list = reader(lambda line: ", ".join(item.strip().lower() for item in line.split(",")))
# A list, split at spaces or commas; its order counts.
read_items = reader(lambda line: " ".join(line.lower().replace(",", " ").split()))
# The same, but its order does not count.
read_set = reader(lambda line: " ".join(sorted(line.lower().replace(",", " ").split())))


def read_text(reply: str, _exchange: Exchange) -> str | None:
    """Return the whole reply, which is the answer, without spaces at its lines' ends."""
    return "\n".join(line.rstrip() for line in reply.strip().split("\n")) or None
