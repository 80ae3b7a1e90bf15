"""One server that records and takes published drafters: each test leaves it to the next."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.commands.servers import LEAST, Servers
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.serving.scheduler.metrics import (
    ACCEPTED,
    DRAFTED,
    DRAFTER,
    RECORDED,
    RECORDED_BYTES,
    SHED,
)
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample
from sglang_hyperdflash.training.store.identity import identity_of
from sglang_hyperdflash.training.store.reader import StoreReader
from tests.conftest import EXAMPLE
from tests.engine import conftest
from tests.engine.asking import post, samples
from tests.engine.conftest import greedy, greedy_all, greedy_together, ids, retractions
from tests.engine.drafters import poisoned, with_config, with_idle_head
from tests.waiting import until

pytestmark = pytest.mark.slow
CHUNK, NEW = 16, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def server(servers, target_dir, drafter_dir, folder) -> Iterator[Server]:
    """Little K/V: some requests go back to the queue and are computed again."""
    environment = {RECORD: str(folder / "store"), f"{RECORD}_SHARE": "1"}
    environment |= {f"{RECORD}_CONTEXT": "0.5"}
    environment |= conftest.install_plugin(folder, "optimistic", conftest.OPTIMISTIC)
    arguments = (*conftest.FP32, "--enable-metrics", *conftest.SMALL_POOL)
    arguments += ("--max-total-tokens", "520")
    arguments += ("--chunked-prefill-size", str(CHUNK), *hyperdflash_arguments(drafter_dir))
    yield servers.get("learning", target_dir, *arguments, environment=environment)
    servers.stop("learning")


def total(server: Server, family: str) -> float:
    return sum(samples(server, family).values())


def assert_samples(target_dir: Path, source: StoreReader, asked: list[tuple[list[int], dict]]):
    """Every sample is the end of a request, with the target's own residual; their starts."""
    target, starts = LocalTarget(target_dir), []
    whole = [(p, p + a["output_ids"]) for p, a in asked]
    for i, sample in enumerate(source.samples):
        stored = sample.tokens.tolist()
        ((prompt, tokens),) = [one for one in whole if one[1][-len(stored) :] == stored]
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


def test_a_sample_is_what_a_capture_of_the_request_would_be(
    server, target_dir, own_prompts, own_reference, folder
):
    """Chunked prefills, cached prefixes, retractions, drafts accepted and rejected."""
    prompts = own_prompts[:8]
    answers = greedy_together(server, prompts)
    assert ids(answers) == own_reference[:8]
    assert retractions(server) > 0 and max(map(len, prompts)) > CHUNK
    # Nobody writes weights, so the recording goes on.
    looked = requests.get(f"{server.url}/weights_checker", timeout=120).json()
    assert looked["success"] and {n[:6] for n in looked["ranks"][0]["checksums"]} > {"draft."}
    out = greedy(server, own_prompts[11], sampling={"custom_params": {"hyperdflash_record": False}})
    assert out["output_ids"] == own_reference[11]
    seeded = {"temperature": 1.0, "sampling_seed": 7}
    asked = list(zip(prompts, answers, strict=True))
    asked += [(p, greedy(server, p, 48, sampling=seeded)) for p in own_prompts[8:11]]
    # Conversations of which most is cached, and a little less than half.
    first = own_prompts[10] + asked[-1][1]["output_ids"]
    turns = [first + own_prompts[1][:20], first[:30] + own_prompts[6]]
    asked += list(zip(turns, greedy_all(server, turns, 1), strict=True))
    launched = 1  # the launch's own request
    until(lambda: total(server, RECORDED) + total(server, SHED) >= len(asked) + launched)
    shed = {dict(labels)["reason"]: n for labels, n in samples(server, SHED).items() if n}
    source = StoreReader(folder / "store")
    assert shed == {"cached": 1} and len(source.samples) == total(server, RECORDED) == len(asked)
    assert source.identity == identity_of(TargetFiles(str(target_dir)), "float32")
    known = [p + a["output_ids"] for p, a in asked]
    for sample in source.samples:
        stored, ((start, _),) = sample.tokens.tolist(), sample.spans
        if not any(tokens[-len(stored) :] == stored for tokens in known):
            asked.append((stored[:start], {"output_ids": stored[start:]}))
    assert len(asked) - len(known) <= launched
    assert max(assert_samples(target_dir, source, asked)) == 30  # the others' template is cached
    size = sum(path.stat().st_size for path in (folder / "store" / "shards").iterdir())
    assert 0.9 * size < total(server, RECORDED_BYTES) <= size


def test_a_published_drafter_is_taken_and_a_poisoned_one_left(
    server, drafter_dir, own_prompts, own_reference, folder, tmp_path
):
    """Answers stay the baseline's while drafters change under running requests."""
    published, said = folder / "published", list[str]()
    servers = Servers([server.url], published, drafter_dir, said.append)

    def ask() -> None:
        answers = ids(greedy_all(server, own_prompts, 4, partial(greedy, max_new_tokens=NEW)))
        assert answers == [tokens[:NEW] for tokens in own_reference]

    def traffic() -> None:
        """Drafters change while requests run."""
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            while not asking.done():
                servers.look()
                wait([asking], 0.2)
            asking.result()

    def drafts_with(number: int) -> bool:
        return [*samples(server, DRAFTER).values()] == [number]

    def first_drafts() -> list[float]:
        return [
            sum(n for labels, n in samples(server, name).items() if ("position", "1") in labels)
            for name in (ACCEPTED, DRAFTED)
        ]

    other = with_idle_head(EXAMPLE / "hyperdflash", tmp_path / "other", like=drafter_dir)
    for number, drafter in ((1, other), (2, drafter_dir)):
        assert publish(published, drafter) == number
        until(partial(drafts_with, number), meanwhile=traffic)
        before = first_drafts()
        traffic()
        accepted, drafted = map(float.__sub__, first_drafts(), before)
        assert accepted > 0.3 * drafted > 0
    until(lambda: servers.total().drafted >= LEAST, meanwhile=traffic)
    publish(published, poisoned(drafter_dir, tmp_path / "bad"))
    until(lambda: any("version 3 is withdrawn" in line for line in said), meanwhile=traffic)
    assert any("drafts with version 3" in line for line in said)
    assert drafts_with(2) and current(published).number == 2
    # The drafter from before drafts well, from its own K/V and the poisoned one's.
    before = first_drafts()
    traffic()
    accepted, drafted = map(float.__sub__, first_drafts(), before)
    assert accepted > 0.3 * drafted > 0
    # What does not fit, as a target with another collapse, changes nothing.
    raw = json.loads((drafter_dir / "config.json").read_text())["hyperdflash_config"]
    target = raw["target"] | {"hc_head_fingerprint": "0" * 16}
    fields = {"hyperdflash_config": {"target": target}}
    publish(published, with_config(drafter_dir, tmp_path / "target", **fields))
    until(lambda: "version 4 was not taken" in said[-1], meanwhile=traffic)
    assert drafts_with(2) and "hc_head_fingerprint" in said[-1]


def test_a_drafter_is_replaced_while_a_long_answer_runs(server, drafter_dir, own_prompts):
    """SGLang's own update waits for the end of every request; a drafter's waits for a round."""
    body = {"model_path": str(drafter_dir), "load_format": "hyperdflash", "token_step": 7}
    sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    payload = {"input_ids": own_prompts[0], "sampling_params": sampling, "stream": True}
    with post(server, "/generate", payload, stream=True) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        reply = post(server, "/update_weights_from_disk", body)
        assert reply.status_code == 200, reply.text
        rest = [line for line in lines if line.startswith(b"data: {")]
    assert first and len(rest) > 1, "the answer went on after the update"
    assert [*samples(server, DRAFTER).values()] == [7]
