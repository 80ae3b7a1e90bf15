"""The checkpoint, its drafter and the target's own answers, made once a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import ids
from tests.engine.v4.checkpoint import write_drafter, write_target
from tests.engine.v4.serve import Answers, ask, prompts, start
from tests.engine.v4.trace import ROWS, Rows, read_rows

# Around the ends of windows (128) and pages (256), and none of them at once.
LENGTHS = (5, 127, 130, 250, 256, 300)
NEW_TOKENS = 96


@dataclass(frozen=True)
class Reference:
    """No speculation: prompts, greedy answers and every row of attention."""

    prompts: Answers
    answers: Answers
    rows: Rows


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("v4") / "target")


@pytest.fixture(scope="session")
def drafter(tmp_path_factory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("v4") / "drafter")


@pytest.fixture(scope="session")
def reference(servers, target, tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("v4-reference")
    rows = folder / "rows.jsonl"
    server = start(servers, "none", target, folder, **{ROWS: str(rows)})
    batch = prompts(*LENGTHS)
    answers = ids(ask(server, batch, NEW_TOKENS))
    servers.stop("v4-none")
    return Reference(batch, answers, read_rows(rows))
