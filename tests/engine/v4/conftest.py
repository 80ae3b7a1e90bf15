"""The checkpoint, its drafter and what no speculation answers, made once a session."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import conversation, flush, ids, reused
from tests.engine.v4.checkpoint import write_drafter, write_target
from tests.engine.v4.serve import Answers, ask, known, prompts, start
from tests.engine.v4.trace import ROWS, Rows, read_rows

# Around the ends of windows (128) and pages (256), and none of them at once.
LENGTHS = (5, 120, 127, 128, 130, 250, 255, 256, 300, 383)
# The top 512 of more than 512 rows of four tokens: the index really selects.
LONG = 2100
TOKENS = {"first": 160, "second": 60, "long": 64}
TALK, TALK_TOKENS = prompts(*[75] * 9, seed=4), 20
Pair = tuple[Answers, Answers]


@dataclass(frozen=True)
class Texts:
    """Prompts and the target's greedy answers without speculation, and its rows of attention.

    asked: ``first`` turns, ``second`` turns that follow them, one ``long`` prompt; and ``talk``, a
        conversation of nine turns. reused: prompt tokens of each of its turns, and those cached.
    """

    asked: dict[str, Pair]
    reused: list[tuple[int, int]]
    rows: Rows

    def oracle(self, folder: Path) -> dict[str, str]:
        for pair in self.asked.values():
            environment = known(folder, *pair)
        return environment

    def count(self, *names: str) -> int:
        """Rows of attention of these texts."""
        rids = {f"{name[0]}{len(prompt)}" for name in names for prompt in self.asked[name][0]}
        return sum(rid in rids for rid, *_ in self.rows)

    def few(self, tokens: int = 96) -> Pair:
        """Six short prompts and the begins of their answers."""
        batch, answers = self.asked["first"]
        return batch[:6], [answer[:tokens] for answer in answers[:6]]


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("v4") / "target")


@pytest.fixture(scope="session")
def drafter(tmp_path_factory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("v4") / "drafter")


@pytest.fixture(scope="session")
def texts(servers, target, tmp_path_factory) -> Texts:
    folder = tmp_path_factory.mktemp("v4-texts")
    server = start(servers, "texts", target, folder, **{ROWS: str(folder / "rows.jsonl")})

    def answered(name: str, batch: Answers) -> Pair:
        return batch, ids(ask(server, batch, TOKENS[name], name[0]))

    asked = {"first": answered("first", prompts(*LENGTHS))}
    assert len(set(map(tuple, asked["first"][1]))) == len(LENGTHS)
    tails = prompts(*[20] * len(LENGTHS), seed=1)
    turns = [p + a + tail for p, a, tail in zip(*asked["first"], tails, strict=True)]
    asked["second"] = answered("second", turns)
    asked["long"] = answered("long", prompts(LONG, seed=2))
    flush(server)
    talk = conversation(server, TALK, TALK_TOKENS)
    servers.stop("v4-texts")
    contexts, answers = [TALK[0]], ids(talk)
    for turn, answer in zip(TALK[1:], answers, strict=False):
        contexts.append(contexts[-1] + answer + turn)
    asked["talk"] = (contexts, answers)
    return Texts(asked, reused(talk), read_rows(folder / "rows.jsonl"))
