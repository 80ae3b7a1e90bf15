"""The log of servers that are started again and again."""

from __future__ import annotations

import sys

import pytest

from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import Server
from tests.waiting import PATIENCE


def test_a_later_server_leaves_the_earlier_one_s_log(tmp_path):
    """Found as: the log of the server that had died was gone when its successor started."""
    log = tmp_path / "logs" / "server.log"
    for word in ("first", "second"):
        launcher = (sys.executable, "-c", f"print('the {word} died')")
        with Server("any", log=log, launcher=launcher) as server:
            with pytest.raises(ServerFailed) as found:
                server.wait(PATIENCE)
            assert f"the {word} died" in str(found.value)
    assert log.read_text() == "the first died\nthe second died\n"
    assert "first" not in str(found.value)
