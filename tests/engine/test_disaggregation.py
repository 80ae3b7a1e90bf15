"""A prefill node and a decode node on one machine, their K/V sent over TCP by Mooncake.

Not in CI: it needs Mooncake's CPU build and libibverbs (``make pd-test``).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from sglang_hyperdflash.draft.published import publish
from sglang_hyperdflash.serving.scheduler.follow import FOLLOW
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.engine.asking import payloads
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, ids, install_plugin
from tests.engine.drafters import assert_lengths_vary, poisoned
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
        self.prefill, self.decode, self.folder = prefill, decode, folder
        self.bootstrap, self.rooms = bootstrap, count(1)

    def ask(self, _, prompt: list[int], **sampling) -> dict:
        """Both are sent the request at once; the decode node's answer is the whole one."""
        options = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap}
        options["bootstrap_room"] = next(self.rooms)
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
    # With overlap a cached prefix is sent early, behind a CUDA event.
    prefill = ("--disaggregation-bootstrap-port", str(bootstrap), "--disable-overlap-schedule")
    # The other kind of backup is in pinned memory.
    decode = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    started = [
        servers.get(f"pd-{mode}", target_dir, *common, *options, environment=environment)
        for mode, options in (
            ("prefill", ("--disaggregation-mode", "prefill", *prefill)),
            ("decode", ("--disaggregation-mode", "decode", *decode)),
        )
    ]
    yield Pair(*started, bootstrap, folder / "published")
    servers.stop("pd-prefill")
    servers.stop("pd-decode")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_are_the_baselines(pair, own_prompts, own_reference, concurrency):
    assert ids(greedy_all(pair.decode, own_prompts, concurrency, pair.ask)) == own_reference
    assert len(own_reference[0]) == NEW_TOKENS


def test_seeded_penalised_answers_are_the_baselines(pair, own_prompts, baseline):
    """The decode node counts the token that the prefill node drew, and goes on with its noise."""
    every = payloads("penalties", own_prompts)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda p: pair.ask(None, p["input_ids"], **p["sampling_params"]), every)
        assert ids(found) == [choices[0]["ids"] for choices in baseline["penalties"]]


def test_the_drafters_kv_travel_with_the_targets(pair, hyper_server, own_prompts):
    """The decode node drafts from the first round as a server that prefilled by itself."""
    found = greedy_all(pair.decode, own_prompts, 1, pair.ask)
    expected = greedy_all(hyper_server, own_prompts, 1)
    assert_lengths_vary([counters(one["meta_info"])[2] for one in expected])
    for one, other in zip(found, expected, strict=True):
        assert counters(one["meta_info"])[2] == counters(other["meta_info"])[2] != []


def test_both_nodes_follow_what_is_published(
    pair, drafter_dir, own_prompts, own_reference, tmp_path
):
    """The decode node leaves a poisoned version; both take the next one."""

    def traffic() -> None:
        assert ids(greedy_all(pair.decode, own_prompts, 4, pair.ask)) == own_reference

    def until_said(server: Server, text: str) -> None:
        until(lambda: text in server.log.read_text(errors="replace"), meanwhile=traffic)

    publish(pair.folder, poisoned(drafter_dir, tmp_path / "bad"))
    until_said(pair.decode, "version 1 is not taken")
    publish(pair.folder, drafter_dir)
    for node in (pair.prefill, pair.decode):
        until_said(node, "drafting with version 2")
    assert "is not taken" not in pair.prefill.log.read_text(errors="replace")
