"""A server that records: its answers, and what it leaves in the store, through a real engine."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.serving.scheduler.metrics import RECORDED, RECORDED_BYTES, ROUNDS, SHED
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample
from sglang_hyperdflash.training.store.identity import identity_of
from sglang_hyperdflash.training.store.reader import StoreReader
from tests.engine.conftest import (
    FP32,
    OPTIMISTIC,
    SMALL_POOL,
    flush,
    greedy,
    greedy_all,
    greedy_together,
    ids,
    install_plugin,
    retractions,
)
from tests.engine.test_metrics import samples
from tests.waiting import until

CHUNK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recording") / "store"


@pytest.fixture(scope="module")
def environment(tmp_path_factory, folder) -> dict[str, str]:
    plugin = install_plugin(tmp_path_factory.mktemp("plugin"), "optimistic", OPTIMISTIC)
    return plugin | {RECORD: str(folder), f"{RECORD}_SHARE": "1", f"{RECORD}_CONTEXT": "0.5"}


@pytest.fixture
def start(servers, target_dir, drafter_dir, environment) -> Callable[[], Server]:
    """Starts the server, or gives the one that runs."""
    # Little K/V: some requests go back to the queue and are computed again.
    arguments = (*FP32, *SMALL_POOL, "--enable-metrics", "--chunked-prefill-size", str(CHUNK))
    arguments += hyperdflash_arguments(drafter_dir)
    return lambda: servers.get("recording", target_dir, *arguments, environment=environment)


def total(server: Server, family: str) -> float:
    return sum(samples(server, family).values())


def scheduler_of(server: Server) -> int:
    """The process id of its scheduler."""
    (found,) = (
        child.pid
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler" in " ".join([child.name(), *child.cmdline()])
    )
    return found


def wait_until_recorded(server: Server, count: int) -> None:
    """So many requests are in the store, or were shed."""

    def done() -> float:
        return total(server, RECORDED) + total(server, SHED)

    until(lambda: done() >= count, "not all were recorded")
    assert done() == count


def assert_samples(target_dir: Path, source: StoreReader, asked: list[tuple[list[int], dict]]):
    """Every sample is the end of a request, with the target's own residual; their starts."""
    target, starts = LocalTarget(target_dir), []
    for i, sample in enumerate(source.samples):
        stored = sample.tokens.tolist()
        whole = [
            (prompt, prompt + answer["output_ids"])
            for prompt, answer in asked
            if (prompt + answer["output_ids"])[-len(stored) :] == stored
        ]
        if not whole and len(stored) < 40:  # the launch's own request
            whole = [(stored[: sample.spans[0][0]], stored)]
        ((prompt, tokens),) = whole
        start = len(tokens) - len(stored)
        assert sample.spans == ((len(prompt) - start, len(stored)),)
        online = OnlineFeatures(target, [Sample.continuation(tokens, 1)])
        wanted = online.states([0]).residual[0, start:]
        found = source.states([i]).residual[0]
        # Relative to their size: residuals reach the hundreds.
        assert (found - wanted)[:-1].abs().max() < 1e-4 * wanted.abs().max()
        assert not found[-1].any()  # no pass has read the last token
        starts.append(start)
    return starts


def seeded(server: Server, prompt: list[int]) -> dict:
    return greedy(server, prompt, 48, sampling={"temperature": 1.0, "sampling_seed": 7})


def test_a_sample_is_what_a_capture_of_the_request_would_be(
    start, target_dir, own_prompts, own_reference, folder
):
    """Chunked prefills, cached prefixes, retractions, drafts accepted and rejected."""
    server, prompts = start(), own_prompts[:8]
    answers = greedy_together(server, prompts)
    assert ids(answers) == own_reference[:8]
    assert retractions(server) > 0 and max(map(len, prompts)) > CHUNK
    # Nobody writes weights, so the recording goes on.
    looked = requests.get(f"{server.url}/weights_checker", timeout=120).json()
    assert looked["success"] and {n[:6] for n in looked["ranks"][0]["checksums"]} > {"draft."}
    out = greedy(server, own_prompts[11], sampling={"custom_params": {"hyperdflash_record": False}})
    assert out["output_ids"] == own_reference[11]
    # Conversations of which most is cached, and a little less than half.
    first = own_prompts[0] + own_reference[0]
    turns = [first + own_prompts[1][:20], first[:30] + own_prompts[6]]
    asked = list(zip(prompts, answers, strict=True))
    asked += [(prompt, seeded(server, prompt)) for prompt in own_prompts[8:11]]
    asked += list(zip(turns, greedy_all(server, turns, 1), strict=True))
    wait_until_recorded(server, len(asked) + 1)  # and the launch's own
    shed = {dict(labels)["reason"]: n for labels, n in samples(server, SHED).items() if n}
    source = StoreReader(folder)
    assert shed == {"cached": 1} and len(source.samples) == total(server, RECORDED) == len(asked)
    assert source.identity == identity_of(TargetFiles(str(target_dir)), "float32")
    assert max(assert_samples(target_dir, source, asked)) == 30  # the others' template is cached
    size = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert 0.9 * size < total(server, RECORDED_BYTES) <= size


@pytest.mark.faults
def test_a_full_disk_sheds_requests_while_their_answers_go_on(
    start, own_prompts, own_reference, folder
):
    """From half way on, no file of the scheduler's can grow to the size of a shard."""
    server = start()
    scheduler = scheduler_of(server)
    flush(server)

    def shed() -> float:
        return {dict(k)["reason"]: n for k, n in samples(server, SHED).items()}.get("disk", 0.0)

    def serve(first: int) -> None:
        chosen = slice(first, first + 4)
        assert ids(greedy_all(server, own_prompts[chosen], 4)) == own_reference[chosen]

    until(lambda: total(server, RECORDED) > 0)  # the launch's own request
    stored, most = total(server, RECORDED), server.log.stat().st_size + (64 << 10)
    before = resource.prlimit(scheduler, resource.RLIMIT_FSIZE)
    resource.prlimit(scheduler, resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        serve(0)
        until(lambda: shed() == 4)
        assert total(server, RECORDED) == stored
    finally:
        resource.prlimit(scheduler, resource.RLIMIT_FSIZE, before)
    serve(4)
    until(lambda: total(server, RECORDED) == stored + 4)
    found = [sample.tokens.tolist() for sample in StoreReader(folder).samples]
    for prompt, answer in zip(own_prompts[4:8], own_reference[4:8], strict=True):
        assert any((prompt + answer)[-len(tokens) :] == tokens for tokens in found)
    assert server.log.read_text(errors="replace").count("requests were not recorded") == 1


def test_a_killed_server_leaves_a_store_that_the_next_one_continues(
    start, servers, target_dir, own_prompts, own_reference, folder
):
    server = start()
    held = [sample.tokens.tolist() for sample in StoreReader(folder).samples]
    assert held
    with ThreadPoolExecutor(1) as pool:
        # More than can be answered before the kill.
        begun = total(server, ROUNDS)
        running = pool.submit(greedy_all, server, own_prompts * 50, 8)
        until(lambda: total(server, ROUNDS) > begun + 50 or running.done())
        servers.stop("recording")  # SIGKILL
        assert running.exception() is not None
    again = [sample.tokens.tolist() for sample in StoreReader(folder).samples]
    assert again[: len(held)] == held
    server = start()
    asked = [(own_prompts[3], greedy(server, own_prompts[3]))]
    assert asked[0][1]["output_ids"] == own_reference[3]
    wait_until_recorded(server, 2)
    assert [path.name for path in (folder / "manifests").glob("*.jsonl")] == ["server-0.jsonl"]
    found = [sample.tokens.tolist() for sample in StoreReader(folder).samples]
    assert found[: len(again)] == again
    assert own_prompts[3] + own_reference[3] in found[len(again) :]
    servers.stop("recording")
