"""A prefill node and a decode node on one machine, their K/V sent over TCP by Mooncake.

Not in CI: it needs Mooncake's CPU build and libibverbs (``make pd-test``).
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from sglang_hyperdflash.commands.servers import Servers
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.serving.scheduler.metrics import DRAFTER
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.engine import probes
from tests.engine.asking import payloads, samples
from tests.engine.conftest import (
    FP32,
    NEW_TOKENS,
    greedy,
    greedy_all,
    ids,
    install_plugin,
    probed,
)
from tests.engine.drafters import assert_lengths_vary, poisoned
from tests.waiting import until

pytestmark = pytest.mark.disaggregation
# SGLang copies the page list to pinned memory behind a CUDA event, unless the sender asks not to.
PLUGIN = """
def load():
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
"""


class Pair:
    """A prefill and a decode server, asked as SGLang's router asks them."""

    def __init__(self, prefill: Server, decode: Server, bootstrap: int, blocks: Path) -> None:
        self.prefill, self.decode, self.blocks = prefill, decode, blocks
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
    environment |= probed(folder, probes.BLOCKS)
    bootstrap = free_port()
    common = (*FP32, *hyperdflash_arguments(drafter_dir), "--enable-metrics")
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
    yield Pair(*started, bootstrap, folder / probes.FILES[probes.BLOCKS])
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


def first_blocks(log: Path, answers: list[dict]) -> list[list]:
    """Of each answer's first block: position, anchor, copies, the drafter's first choices.

    Without copies these are the drafts; the buffer is not written then.
    """
    blocks: dict[str, list] = {}
    for request, place, block, copies, firsts in map(json.loads, log.read_text().splitlines()):
        choices = firsts if copies[0] >= 0 else block[1:]
        blocks.setdefault(request, [place, block[0], copies, choices])
    return [blocks[answer["meta_info"]["id"]] for answer in answers]


def test_the_drafters_kv_travel_with_the_targets(pair, hyper_server, probe_folder, own_prompts):
    """The decode node drafts and copies as a server that prefilled by itself, from the start."""
    answers = greedy_all(pair.decode, own_prompts, 1, pair.ask)
    expected = greedy_all(hyper_server, own_prompts, 1)
    here = first_blocks(probe_folder / probes.FILES[probes.BLOCKS], expected)
    assert first_blocks(pair.blocks, answers) == here
    assert len({tuple(firsts) for *_, firsts in here}) > len(here) / 2
    counts = [[counters(one["meta_info"])[2] for one in each] for each in (answers, expected)]
    assert_lengths_vary(counts[1])
    accepted = [sum(i * n for one in each for i, n in enumerate(one)) for each in counts]
    assert accepted[0] == pytest.approx(accepted[1], rel=0.1), "copies' weights differ, no more"


def test_both_nodes_take_what_is_published(pair, drafter_dir, own_prompts, own_reference, tmp_path):
    """Both leave a poisoned version, by the decode node's traffic, and take the next one."""
    published, nodes = tmp_path / "published", (pair.prefill, pair.decode)
    servers = Servers([node.url for node in nodes], published, drafter_dir, print)

    def traffic() -> None:
        assert ids(greedy_all(pair.decode, own_prompts, 4, pair.ask)) == own_reference
        servers.look()

    def draft_with(number: int) -> bool:
        return all([*samples(node, DRAFTER).values()] == [number] for node in nodes)

    publish(published, poisoned(drafter_dir, tmp_path / "bad"))
    until(lambda: draft_with(1), meanwhile=traffic)
    until(lambda: draft_with(0), meanwhile=traffic)
    assert current(published) is None
    publish(published, drafter_dir)
    until(lambda: draft_with(2), meanwhile=traffic)
