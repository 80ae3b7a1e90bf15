"""A prefill node and a decode node on one machine, their K/V sent over TCP by Mooncake.

Not in CI: it needs Mooncake's CPU build and libibverbs (``make pd-test``).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, zip_longest
from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.draft.published import publish
from sglang_hyperdflash.serving.scheduler.follow import FOLLOW
from sglang_hyperdflash.tools.acceptance import accept_length_of, counters
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, ids, install_plugin
from tests.engine.drafters import assert_lengths_vary, poisoned
from tests.engine.test_exact import sampled, tokens_of
from tests.waiting import until

pytestmark = pytest.mark.disaggregation
# SGLang copies the page list to pinned memory behind a CUDA event, unless the sender asks not to.
# The trial of a published drafter is short.
PLUGIN = """
def load():
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    from sglang_hyperdflash.serving.scheduler import guard

    MooncakeKVSender.supports_host_tensor_indices = False
    guard.REQUESTS = 12
"""


class Pair:
    """A prefill and a decode server, asked as SGLang's router asks them; both follow a folder."""

    def __init__(self, prefill: Server, decode: Server, bootstrap: int, folder: Path) -> None:
        self.prefill, self.decode, self.bootstrap = prefill, decode, bootstrap
        self.folder = folder
        self.rooms = count(1)

    def ask(self, _, prompt: list[int], **sampling) -> dict:
        """Both are sent the request at once; the decode node's answer is the whole one.

        Args:
            sampling: parameters other than those of a greedy answer.
        """
        options = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap,
            "bootstrap_room": next(self.rooms),
        }
        with ThreadPoolExecutor(2) as pool:
            first, whole = pool.map(
                lambda server: greedy(server, prompt, sampling=sampling, **options),
                (self.prefill, self.decode),
            )
        assert whole["output_ids"][:1] == first["output_ids"]
        return whole


@pytest.fixture(scope="module")
def pair(servers, target_dir, drafter_dir, tmp_path_factory) -> Iterator[Pair]:
    import mooncake.engine  # noqa: F401  here, so that its absence is an error of its own

    folder = tmp_path_factory.mktemp("pd")
    environment = {**install_plugin(folder, "cpu_pd", PLUGIN), "MOONCAKE_PROTOCOL": "tcp"}
    environment[FOLLOW] = str(folder / "published")
    bootstrap = free_port()
    common = (*FP32, *hyperdflash_arguments(drafter_dir))
    common += ("--disaggregation-transfer-backend", "mooncake")
    modes = {
        # With overlap a cached prefix is sent early, behind a CUDA event.
        "prefill": (
            "--disaggregation-bootstrap-port",
            str(bootstrap),
            "--disable-overlap-schedule",
        ),
        # The other kind of backup is in pinned memory.
        "decode": ("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    }
    started = [
        servers.get(
            f"pd-{mode}",
            target_dir,
            *common,
            "--disaggregation-mode",
            mode,
            *options,
            environment=environment,
        )
        for mode, options in modes.items()
    ]
    yield Pair(*started, bootstrap, folder / "published")
    for mode in modes:
        servers.stop(f"pd-{mode}")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_are_the_baselines(pair, own_prompts, own_reference, concurrency):
    assert ids(greedy_all(pair.decode, own_prompts, concurrency, pair.ask)) == own_reference
    assert len(own_reference[0]) == NEW_TOKENS


def test_seeded_penalised_answers_are_one_server_s(pair, hyper_server, own_prompts):
    """The decode node counts the token that the prefill node drew, and goes on with its noise."""
    setting = {"top_p": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.3}
    every = [sampled(i, **setting) for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: pair.ask(None, own_prompts[i], **every[i]), range(6)))
    assert ids(found) == tokens_of(hyper_server, own_prompts[:6], every, 3)


def test_the_drafters_kv_travel_with_the_targets(pair, hyper_server, own_prompts):
    """The decode node drafts from the first round as a server that prefilled by itself."""
    found = greedy_all(pair.decode, own_prompts, 1, pair.ask)
    expected = greedy_all(hyper_server, own_prompts, 1)
    assert_lengths_vary([counters(one["meta_info"])[2] for one in expected])
    for one, other in zip(found, expected, strict=True):
        assert counters(one["meta_info"])[2] == counters(other["meta_info"])[2] != []


def test_both_nodes_follow_what_is_published(
    pair, hyper_server, drafter_dir, own_prompts, own_reference, tmp_path
):
    """The decode node leaves a poisoned version; the prefill node writes its K/V till the next."""

    def rounds(concurrency: int = 1) -> list[list[int]]:
        """Of each answer, rounds by the number of drafts accepted."""
        found = greedy_all(pair.decode, own_prompts, concurrency, pair.ask)
        assert ids(found) == own_reference
        return [counters(one["meta_info"])[2] for one in found]

    def said(server: Server, text: str) -> bool:
        return text in server.log.read_text(errors="replace")

    def with_own_kv() -> list[list[int]]:
        asked = {"params": {"timeout": 30}, "timeout": 60}
        requests.post(f"{pair.prefill.url}/flush_cache", **asked).raise_for_status()
        return rounds()

    def tau(histograms: list[list[int]]) -> float:
        return accept_length_of(list(map(sum, zip_longest(*histograms, fillvalue=0))))

    answers = greedy_all(hyper_server, own_prompts, 1)
    expected = [counters(one["meta_info"])[2] for one in answers]
    publish(pair.folder, poisoned(drafter_dir, tmp_path / "bad"))
    refused = "version 1 is not taken: its first drafts"
    until(lambda: said(pair.decode, refused), meanwhile=lambda: rounds(4))
    assert said(pair.prefill, "drafting with version 1")
    mixed = with_own_kv()
    publish(pair.folder, drafter_dir)
    nodes = (pair.prefill, pair.decode)
    taken = "drafting with version 2"
    until(lambda: all(said(node, taken) for node in nodes), meanwhile=lambda: rounds(4))
    assert not said(pair.prefill, "is not taken")
    print(f"tau {tau(mixed):.3f} with the poisoned version's K/V, {tau(expected):.3f} with its own")
    assert tau(mixed) < tau(expected)
    assert with_own_kv() == expected
