"""A prefill node and a decode node on one machine, their K/V sent over TCP by Mooncake.

Not in CI: it needs Mooncake's CPU build and libibverbs (``make pd-test``).
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import requests

from eval.histograms import accept_length_of, add_histograms
from sglang_hyperdflash.commands.servers import Servers
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.serving.scheduler.metrics import DRAFTER
from sglang_hyperdflash.serving.settings import COPY, POOL_RATIO
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.engine.asking import add_result, payloads, samples
from tests.engine.conftest import (
    FP32,
    NEW_TOKENS,
    VOCABULARY_ORDER,
    greedy,
    greedy_all,
    ids,
    install_plugin,
    retractions,
)
from tests.engine.drafters import poisoned, with_window
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

    def __init__(self, start: Callable[..., Server], bootstrap: int, draft: Path, kind: str):
        self.start, self.draft, self.name = start, draft, kind
        self.both = KINDS[kind][0]
        self.bootstrap, self.rooms = bootstrap, count(1)
        self.prefill, self.decode = start("prefill"), start("decode")

    def ask(self, decode: Server, prompt: list[int], tokens: int = NEW_TOKENS, **sampling) -> dict:
        """Both are sent the request at once; the decode node's answer is the whole one."""
        options = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap}
        options["bootstrap_room"] = next(self.rooms)
        with ThreadPoolExecutor(2) as pool:
            first, whole = pool.map(
                lambda server: greedy(server, prompt, tokens, sampling=sampling, **options),
                (self.prefill, decode),
            )
        assert whole["output_ids"][:1] == first["output_ids"]
        return whole


# Whether the prefill node has the algorithm, and the window of the drafter.
KINDS = {"prefill without speculation": (False, None), "both nodes, a window": (True, 64)}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, servers, target_dir, drafter_dir, tmp_path_factory) -> Iterator[Pair]:
    import mooncake.engine  # noqa: F401  here, so that its absence is an error of its own

    both, window = KINDS[request.param]
    folder = tmp_path_factory.mktemp("pd")
    environment = {
        **install_plugin(folder, "cpu_pd", PLUGIN),
        "MOONCAKE_PROTOCOL": "tcp",
        COPY: "0",
        # The small pool of one test holds a window, too.
        POOL_RATIO: "0.5",
        # Requests of a node that is gone end soon.
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
    }
    bootstrap = free_port()
    draft = drafter_dir if window is None else with_window(drafter_dir, folder / "draft", window)
    ours = (*hyperdflash_arguments(draft), "--enable-metrics")
    common = (*FP32, "--disaggregation-transfer-backend", "mooncake")
    # With overlap a cached prefix is sent early, behind a CUDA event.
    prefill = ("--disaggregation-bootstrap-port", str(bootstrap), "--disable-overlap-schedule")
    # A plain prefill node draws a seeded request's first token as the baseline does.
    alone = ("--enable-deterministic-inference",)
    order = install_plugin(tmp_path_factory.mktemp("order"), "order", VOCABULARY_ORDER)
    paths = os.pathsep.join((order["PYTHONPATH"], environment["PYTHONPATH"]))
    drawing = environment if both else environment | {"PYTHONPATH": paths}
    # The other kind of backup is in pinned memory.
    decode = ("--disaggregation-decode-retraction-backup", "cpu_tensor", *ours)
    modes = {
        "prefill": (drawing, (*prefill, *(ours if both else alone))),
        "decode": (environment, decode),
    }

    def start(mode: str, *more: str, name: str = "") -> Server:
        variables, options = modes[mode]
        options = ("--disaggregation-mode", mode, *common, *options, *more)
        return servers.get(f"pd-{name or mode}", target_dir, *options, environment=variables)

    yield Pair(start, bootstrap, draft, request.param)
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
        answers = pool.map(
            lambda p: pair.ask(pair.decode, p["input_ids"], **p["sampling_params"]), every
        )
        assert ids(answers) == [choices[0]["ids"] for choices in baseline["penalties"]]


def rounds(answer: dict) -> list[int]:
    return counters(answer["meta_info"])[2]


def test_drafts_begin_without_the_prompt_and_never_with_anothers(pair, hyper_server, own_prompts):
    """The window is empty at the hand-over: what its slots held is forgotten, whoever wrote it."""
    first = greedy_all(pair.decode, own_prompts, 1, pair.ask)
    greedy_all(pair.decode, own_prompts[::-1], 4, pair.ask)
    assert [rounds(a) for a in greedy_all(pair.decode, own_prompts, 1, pair.ask)] == [
        rounds(a) for a in first
    ]


def test_acceptance_catches_up_with_an_aggregated_server(pair, servers, target_dir, own_prompts):
    """It lacks the prompt at first; ``build/disaggregation.json`` has it by the answers' length."""
    arguments, lengths = (*FP32, *hyperdflash_arguments(pair.draft)), {}
    alone = servers.get("pd-alone", target_dir, *arguments, environment={COPY: "0"})
    for tokens in (16, 96, 256):
        ask, each = partial(greedy, max_new_tokens=tokens), partial(pair.ask, tokens=tokens)
        answers = [greedy_all(alone, own_prompts, 4, ask)]
        answers.append(greedy_all(pair.decode, own_prompts, 4, each))
        assert ids(answers[0]) == ids(answers[1])
        taus = [accept_length_of(add_histograms(map(rounds, side))) for side in answers]
        lengths[tokens] = dict(zip(("aggregated", "disaggregated"), taus, strict=True))
    servers.stop("pd-alone")
    assert lengths[16]["disaggregated"] < lengths[16]["aggregated"]
    assert lengths[256]["disaggregated"] > 0.9 * lengths[256]["aggregated"]
    add_result("disaggregation", pair.name, lengths)


def test_both_nodes_take_what_is_published(pair, own_prompts, own_reference, tmp_path):
    """Both leave a poisoned version, by the decode node's traffic, and take the next one."""
    published = tmp_path / "published"
    nodes = (pair.prefill, pair.decode) if pair.both else (pair.decode,)
    servers = Servers([node.url for node in nodes], published, pair.draft, print)

    def traffic() -> None:
        assert ids(greedy_all(pair.decode, own_prompts, 4, pair.ask)) == own_reference
        servers.look()

    def draft_with(number: int) -> bool:
        return all([*samples(node, DRAFTER).values()] == [number] for node in nodes)

    publish(published, poisoned(pair.draft, tmp_path / "bad"))
    until(lambda: draft_with(1), meanwhile=traffic)
    until(lambda: draft_with(0), meanwhile=traffic)
    assert current(published) is None
    publish(published, pair.draft)
    until(lambda: draft_with(2), meanwhile=traffic)


def right_or_failed(pair: Pair, decode: Server, prompts, expected, tokens: int, end) -> int:
    """How many of eight concurrent requests fail when ``end`` is called after the first answer."""

    def outcome(i: int) -> bool:
        try:
            answer = pair.ask(decode, prompts[i], tokens)
        except (requests.RequestException, AssertionError):
            return False
        reason = answer["meta_info"]["finish_reason"]["type"]
        assert reason == "abort" or answer["output_ids"] == expected[i][:tokens]
        return reason != "abort"

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(outcome, i) for i in range(len(prompts))]
        until(lambda: any(one.done() for one in asked))
        end()
        return sum(not one.result() for one in asked)


def test_full_and_killed_nodes_change_no_answer(pair, servers, own_prompts, baseline, tmp_path):
    """A decode node that retracts; one killed in traffic; then the prefill node, started again."""
    expected = baseline["long"]
    narrow = hyperdflash_arguments(with_window(pair.draft, tmp_path / "draft", 32))
    few = ("--max-total-tokens", "400", "--max-running-requests", "8")
    few += ("--num-reserved-decode-tokens", "16")
    small = pair.start("decode", *few, *narrow, name="small")
    ask = partial(pair.ask, tokens=96)
    assert ids(greedy_all(small, own_prompts, 8, ask)) == expected
    assert retractions(small)
    failed = right_or_failed(
        pair, small, own_prompts, expected, 96, lambda: servers.stop("pd-small")
    )
    assert failed
    assert ids(greedy_all(pair.decode, own_prompts, 4, ask)) == expected
    failed = right_or_failed(
        pair, pair.decode, own_prompts, expected, 96, lambda: servers.stop("pd-prefill")
    )
    pair.prefill = pair.start("prefill")
    assert ids(greedy_all(pair.decode, own_prompts, 4, ask)) == expected
