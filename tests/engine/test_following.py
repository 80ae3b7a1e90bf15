"""A server that follows published drafters: the baseline's answers, and never a worse drafter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hyperdflash.draft.published import publish
from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.serving.scheduler.follow import FOLLOW
from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, ROUNDS, VERSION
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, NEW_TOKENS, flush, greedy_all, ids, install_plugin
from tests.engine.drafters import (
    for_another_target,
    of_another_block,
    poisoned,
    with_idle_head,
    with_window,
)
from tests.engine.test_exact import sampled, tokens_of
from tests.engine.test_metrics import samples
from tests.engine.test_width import RANDOM
from tests.waiting import until

# A short trial that every version passes.
ANY_VERSION = """
def load():
    from sglang_hyperdflash.serving.scheduler import guard

    guard.REQUESTS, guard.DEVIATIONS = 8, 1e9
"""
# A short trial.
SHORT = 24
SHORT_TRIAL = f"""
def load():
    from sglang_hyperdflash.serving.scheduler import guard

    guard.REQUESTS = {SHORT}
"""
SWAPS = 4
# Rounds of more requests than a trial has.
PLENTY = 1500


def start(servers, name: str, target_dir, draft, folder: Path, *arguments, **environment) -> Server:
    arguments = (*FP32, "--enable-metrics", *arguments, *hyperdflash_arguments(draft))
    environment |= {FOLLOW: str(folder)}
    return servers.get(name, target_dir, *arguments, environment=environment)


def by_version(server: Server, family: str, position: str | None = None) -> dict[int, float]:
    found: dict[int, float] = {}
    for labels, value in samples(server, family).items():
        own = dict(labels)
        if own.get("position") == position:
            found[int(own[VERSION])] = value
    return found


@pytest.mark.parametrize(
    "variant",
    [
        "one rank",
        pytest.param("two ranks, random widths", marks=pytest.mark.slow),
        pytest.param("window, random widths", marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_baselines_while_drafters_change(
    servers, hyper_server, target_dir, drafter_dir, own_prompts, own_reference, tmp_path, variant
):
    """Greedy and seeded requests, with requests running at every change."""
    first, second = drafter_dir, tmp_path / "second"
    with_idle_head(EXAMPLE / "hyperdflash", second, like=drafter_dir)
    arguments, environment = (), install_plugin(tmp_path, "any_version", ANY_VERSION)
    if "random" in variant:
        environment |= RANDOM
    if variant.startswith("two"):
        arguments = ("--tp-size", "2")
    if variant.startswith("window"):
        first = with_window(first, tmp_path / "narrow first", 32)
        second = with_window(second, tmp_path / "narrow second", 32)
        arguments = ("--max-running-requests", "8")
        environment[POOL_RATIO] = "0.0068"
    parameters = [sampled(i) for i in range(8)]
    expected = tokens_of(hyper_server, own_prompts[:8], parameters, 4)
    name, folder = f"follow-{variant.replace(' ', '-')}", tmp_path / "published"
    server = start(servers, name, target_dir, first, folder, *arguments, **environment)
    try:

        def traffic() -> None:
            with ThreadPoolExecutor(2) as pool:
                greedy = pool.submit(lambda: ids(greedy_all(server, own_prompts, 4)))
                seeded = pool.submit(tokens_of, server, own_prompts[:8], parameters, 4)
                assert greedy.result() == own_reference
                assert seeded.result() == expected

        for number in range(1, SWAPS + 1):
            assert publish(folder, (first, second)[number % 2]) == number
            # Enough rounds to have accepted drafts.
            until(
                lambda number=number: by_version(server, ROUNDS).get(number, 0) > 100,
                meanwhile=traffic,
            )
        rounds = by_version(server, ROUNDS)
        assert list(rounds) == list(range(SWAPS + 1)) and all(rounds.values())
        accepted = by_version(server, ACCEPTED, "1")
        assert all(accepted.values()), accepted
    finally:
        servers.stop(name)


def test_a_better_drafter_stays_and_a_poisoned_one_is_left(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    """From an untrained drafter, as a learner begins."""
    bad, folder = poisoned(drafter_dir, tmp_path / "bad"), tmp_path / "published"
    environment = install_plugin(tmp_path, "short_trial", SHORT_TRIAL)
    server = start(servers, "follow-guard", target_dir, bad, folder, **environment)

    def traffic() -> None:
        assert ids(greedy_all(server, own_prompts, 4)) == own_reference

    def log() -> str:
        return server.log.read_text(errors="replace")

    def drafted(version: int) -> float:
        return by_version(server, DRAFTED, "1").get(version, 0.0)

    def accepted(version: int) -> float:
        return by_version(server, ACCEPTED, "1").get(version, 0.0)

    def rate(version: int) -> float:
        return accepted(version) / drafted(version)

    try:
        publish(folder, drafter_dir)
        until(lambda: drafted(1) > PLENTY, meanwhile=traffic)
        assert "is not taken" not in log()
        assert rate(0) < 0.1 and rate(1) > 0.4
        # These prompts are cached with K/V of the untrained drafter; without them it drafts better.
        before, with_old = accepted(1), rate(1)
        tried = drafted(1)
        flush(server)
        traffic()
        without = (accepted(1) - before) / (drafted(1) - tried)
        print(f"first drafts accepted: {with_old:.3f} with old K/V of the prompts, {without:.3f}")
        assert without > with_old
        publish(folder, bad)
        until(lambda: "version 2 is not taken" in log(), meanwhile=traffic)
        # Its trial, and the requests that ran before it or when it ended.
        left = drafted(2)
        assert SHORT <= left <= (SHORT + 12) * NEW_TOKENS
        tried, before = drafted(1), accepted(1)
        traffic()
        # The drafter from before drafts, and drafts well, from its own K/V and the poisoned one's.
        assert drafted(2) == left and accepted(1) - before > 0.3 * (drafted(1) - tried) > 0
        # What does not fit is not even tried.
        for number, other in (
            (3, for_another_target(drafter_dir, tmp_path / "target")),
            (4, of_another_block(drafter_dir, tmp_path / "block", 5)),
        ):
            assert publish(folder, other) == number
            until(lambda n=number: f"version {n} is not taken" in log())
        publish(folder, drafter_dir)
        until(lambda: drafted(5) > PLENTY, meanwhile=traffic)
        assert log().count("is not taken") == 3 and drafted(3) == drafted(4) == 0
    finally:
        servers.stop("follow-guard")
