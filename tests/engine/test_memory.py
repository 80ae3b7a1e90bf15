"""A server's pool depends on the server alone, whatever else runs on the machine."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import time
from contextlib import ExitStack

import pytest

from cpu_engine.platform.memory import KV_GIB
from eval.reuse import slot_bytes
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import COMMON, install_plugin
from tests.engine.drafters import with_window
from tests.engine.held import HELD, PLUGIN, drafter_bytes, held, total
from tests.pool_log import logged_pools
from tests.warm_start.client import start as warm

NEIGHBOUR_BYTES = 6 << 30


def neighbour() -> None:
    """Take memory step by step while the servers size their pools, and give it back."""
    taken = []
    while True:
        taken.append(bytearray(b"x") * (NEIGHBOUR_BYTES // 24))
        if len(taken) == 24:
            taken.clear()
        time.sleep(1)


def pools_next_to_a_neighbour(
    target_dir, drafter_dir, folder, start=subprocess.Popen
) -> list[tuple[int, ...]]:
    """Slots of every pool of two servers that start together."""
    process = multiprocessing.get_context("spawn").Process(target=neighbour, daemon=True)
    process.start()
    try:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    Server(
                        target_dir,
                        *(*arguments, "--dtype", "float32"),
                        log=folder / f"{i}.log",
                        start=start,
                    )
                )
                for i, arguments in enumerate(((), hyperdflash_arguments(drafter_dir)))
            ]
            for server in servers:
                server.wait(900)
            return [tuple(p.slots for p in logged_pools(s.log.read_text())) for s in servers]
    finally:
        process.kill()


@pytest.mark.slow
def test_two_servers_next_to_a_greedy_neighbour_get_a_bounded_pool(
    target_dir, drafter_dir, tmp_path
):
    """One GiB of K/V of an 8 M-parameter target, not most of the machine."""
    plain, hyper = pools_next_to_a_neighbour(target_dir, drafter_dir, tmp_path)
    # Eight layers of one K/V head of 64 in fp32, K and V: 4,096 bytes per token.
    assert plain[0] == pytest.approx((1 << 30) / 4096, rel=0.01)
    assert len(hyper) == 2 and 0 < hyper[0] < plain[0]
    assert "K/V on the CPU platform: 1.00 GiB of the" in (tmp_path / "0.log").read_text()


@pytest.mark.slow
def test_twenty_starts_give_the_same_pools(target_dir, drafter_dir, tmp_path):
    """The first start is an ordinary one; the others need no imports and so meet in time."""
    found = {
        tuple(pools_next_to_a_neighbour(target_dir, drafter_dir, tmp_path / str(i), start))
        for i, start in enumerate([subprocess.Popen, *[warm] * 19])
    }
    assert len(found) == 1, found


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
