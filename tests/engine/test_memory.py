"""A server's pool depends on the server alone, whatever else runs on the machine."""

from __future__ import annotations

import math
import multiprocessing
import time

import pytest

from cpu_engine.platform.memory import KV_GIB
from eval.reuse import slot_bytes
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import COMMON, install_plugin
from tests.engine.drafters import with_window
from tests.engine.held import HELD, PLUGIN, drafter_bytes, held, total
from tests.pool_log import logged_pools

NEIGHBOUR_BYTES = 6 << 30


def neighbour() -> None:
    """Take memory step by step while the servers size their pools, and give it back."""
    taken = []
    while True:
        taken.append(bytearray(b"x") * (NEIGHBOUR_BYTES // 24))
        if len(taken) == 24:
            taken.clear()
        time.sleep(1)


@pytest.mark.slow
def test_two_servers_next_to_a_greedy_neighbour_get_a_bounded_pool(
    servers, target_dir, drafter_dir
):
    """One GiB of K/V of an 8 M-parameter target, not most of the machine; twice the same."""
    process = multiprocessing.get_context("spawn").Process(target=neighbour, daemon=True)
    process.start()
    found = set()
    for _ in range(2):
        each = {}
        for name, arguments in {"plain": (), "drafts": hyperdflash_arguments(drafter_dir)}.items():
            options = ("--dtype", "float32", *COMMON, *arguments)
            server = servers.get(f"pool-{name}", target_dir, *options)
            each[name] = tuple(p.slots for p in logged_pools(server.log.read_text()))
            servers.stop(f"pool-{name}")
        found.add((each["plain"], each["drafts"]))
    process.kill()
    ((plain, drafts),) = found
    # Eight layers of one K/V head of 64 in fp32, K and V: 4,096 bytes per token.
    assert plain[0] == pytest.approx((1 << 30) / 4096, rel=0.01)
    assert len(drafts) == 2 and 0 < drafts[0] < plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 64])
def test_a_server_is_left_with_what_it_reserved(servers, target_dir, drafter_dir, tmp_path, window):
    """To the byte: of 64 MiB of K/V, SGLang takes as many tokens as fit, and a spare slot."""
    reserved, name = 1 << 26, f"held-{window}"
    draft = with_window(drafter_dir, tmp_path / "draft", window)
    environment = install_plugin(tmp_path, "held", PLUGIN) | {HELD: str(tmp_path)}
    environment[KV_GIB] = str(reserved / (1 << 30))
    arguments = ("--dtype", "float32", *COMMON, *hyperdflash_arguments(draft))
    server = servers.get(name, target_dir, *arguments, environment=environment)
    servers.stop(name)
    target, own = slot_bytes(target_dir), slot_bytes(draft)
    assert (target, own) == (8 * 2 * 64 * 4, 3 * 2 * 2 * 64 * 4)
    tokens = logged_pools(server.log.read_text())[0].slots - 1
    kv = [size for size, shape in held(tmp_path, "target") if len(shape) == 3]
    assert sum(kv) == target * (tokens + 1)
    found = total(held(tmp_path, "drafter"))
    assert found == drafter_bytes(tokens, own, 3, requests=48, window=window)
    # The drafter's tables of tokens are reserved too; what is not does not grow with tokens.
    draft = own if window is None else math.ceil((own + 8) * 0.1) + 8
    assert 0 <= reserved - tokens * (target + draft) < target + draft
    least = 0 if window is None else 10 * 7 * 48
    fixed = drafter_bytes(least, own, 3, requests=48, window=window)
    assert found <= tokens * draft + fixed
