"""Prefix reuse in pages of 256, where a prefix counts while the K/V of its last window are left."""

from __future__ import annotations

import pytest

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import conversation, ids, reused
from tests.engine.v4.findings import note
from tests.engine.v4.serve import accepted, known, prompts, start
from tests.engine.v4.test_matrix import PAGE

pytestmark = pytest.mark.v4
TURNS, TOKENS = prompts(*[75] * 9, seed=4), 45


def test_every_turn_finds_as_many_cached_tokens(servers, target, drafter, tmp_path):
    (tmp_path / "plain").mkdir()
    server = start(servers, "reuse-none", target, tmp_path / "plain")
    plain = conversation(server, TURNS, TOKENS)
    servers.stop("v4-reuse-none")
    answers, asked = ids(plain), []
    for turn, before in zip(TURNS, [[], *answers], strict=False):
        asked.append((asked[-1] if asked else []) + before + turn)
    environment = known(tmp_path, asked, answers)
    arguments = hyperdflash_arguments(drafter)
    server = start(servers, "reuse", target, tmp_path, *arguments, **environment)
    drafted = conversation(server, TURNS, TOKENS)
    servers.stop("v4-reuse")
    assert ids(drafted) == answers
    assert min(accepted(drafted)) > 0, accepted(drafted)
    assert reused(drafted) == reused(plain)
    tokens, cached = zip(*reused(plain), strict=True)
    assert max(cached) >= 3 * PAGE, cached
    note("prefix reuse of a conversation", tokens=list(tokens), cached=list(cached),
         rate=sum(cached) / sum(tokens))  # fmt: skip
