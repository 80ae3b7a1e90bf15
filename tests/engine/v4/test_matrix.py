"""What a server may do to a request on DeepSeek-V4, against no speculation; ``make v4-test``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.serving.width.settings import WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import ids
from tests.engine.drafters import assert_varied
from tests.engine.v4 import drafts
from tests.engine.v4.checkpoint import write_drafter
from tests.engine.v4.findings import note
from tests.engine.v4.plugin import DEVICE_LENGTHS
from tests.engine.v4.serve import Answers, accepted, ask, known, own_blocks, prompts, start
from tests.engine.v4.test_rounds import assert_rows_are_bit_equal
from tests.engine.v4.trace import ROWS, Rows, read_rows

pytestmark = pytest.mark.v4
LENGTHS = (5, 120, 127, 128, 130, 250, 255, 256, 300, 383)
NEW_TOKENS, TURN_TOKENS, LONG_TOKENS = 160, 60, 64
# The top 512 of more than 512 rows of four tokens: the index really selects.
LONG = 2100
PAGE = 256
# SGLang's own switch: every thirtieth step gives up the newest request, which starts again later.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "30"}


@dataclass(frozen=True)
class Texts:
    """Prompts and the target's own answers: first turns, second turns, one long prompt."""

    first: tuple[Answers, Answers]
    second: tuple[Answers, Answers]
    long: tuple[Answers, Answers]
    rows: Rows

    def oracle(self, folder: Path) -> dict[str, str]:
        for pair in (self.first, self.second, self.long):
            environment = known(folder, *pair)
        return environment


@pytest.fixture(scope="module")
def texts(servers, target, tmp_path_factory) -> Texts:
    folder = tmp_path_factory.mktemp("v4-texts")
    path = folder / "rows.jsonl"
    server = start(servers, "texts", target, folder, **{ROWS: str(path)})
    first, tails = prompts(*LENGTHS), prompts(*[20] * len(LENGTHS), seed=1)
    answers = ids(ask(server, first, NEW_TOKENS))
    second = [p + a + tail for p, a, tail in zip(first, answers, tails, strict=True)]
    turns = ids(ask(server, second, TURN_TOKENS, "t"))
    long = prompts(LONG, seed=2)
    found = ids(ask(server, long, LONG_TOKENS, "l"))
    servers.stop("v4-texts")
    return Texts((first, answers), (second, turns), (long, found), read_rows(path))


def drafting(servers, name: str, target, draft, texts: Texts, folder: Path, *arguments, **more):
    """A HYPERDFLASH server with an oracle that knows every text."""
    environment = texts.oracle(folder) | more
    arguments = (*arguments, *hyperdflash_arguments(draft))
    return start(servers, name, target, folder, *arguments, **environment)


def assert_first_turns(server, texts: Texts) -> list[int]:
    """Rounds by accepted drafts."""
    answers = ask(server, texts.first[0], NEW_TOKENS)
    assert ids(answers) == texts.first[1]
    assert min(accepted(answers)) > 0, accepted(answers)
    return accepted(answers)


def assert_long(server, texts: Texts) -> None:
    answers = ask(server, texts.long[0], LONG_TOKENS, "l")
    assert ids(answers) == texts.long[1]
    assert sum(accepted(answers)[1:]) > 0


def test_turns_page_hits_selection_and_several_answers(servers, target, drafter, texts, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = {ROWS: str(path)}
    server = drafting(servers, "turns", target, drafter, texts, tmp_path, **rows)
    rounds = assert_first_turns(server, texts)
    turns = ask(server, texts.second[0], TURN_TOKENS, "t")
    assert ids(turns) == texts.second[1]
    cached = [answer["meta_info"]["cached_tokens"] for answer in turns]
    assert max(cached) >= PAGE, cached
    assert_long(server, texts)
    compared = assert_rows_are_bit_equal(read_rows(path), texts.rows)
    assert compared >= 0.8 * len(texts.rows)
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "n": 3}
    prompt, answer = texts.first[0][4], texts.first[1][4]
    several = server.generate(input_ids=prompt, sampling_params=sampling)
    assert ids(several) == [answer[:24]] * 3
    abort_in_the_middle(server, prompt)
    again = ask(server, [prompt], NEW_TOKENS, "q")
    assert ids(again) == [answer]
    servers.stop("v4-turns")
    assert f"{drafts.HOST_KNOWS} False" not in server.log.read_text(errors="replace")
    note("turns, page hits, top-k, n > 1, abort", answers="25 of 25", rows=compared,
         reference_rows=len(texts.rows), cached=cached, rounds=rounds)  # fmt: skip


def abort_in_the_middle(server, prompt: list[int]) -> None:
    """Leave a stream after its third token."""
    sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    payload = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    url = f"{server.url}/generate"
    with requests.post(url, json=payload, stream=True, timeout=600) as answer:
        lines = answer.iter_lines()
        for _ in range(3):
            next(lines)


def test_lengths_on_the_device_only(servers, target, drafter, texts, tmp_path):
    path = tmp_path / "rows.jsonl"
    more = {DEVICE_LENGTHS: "1", ROWS: str(path)}
    server = drafting(servers, "device", target, drafter, texts, tmp_path, **more)
    rounds = assert_first_turns(server, texts)
    servers.stop("v4-device")
    assert f"{drafts.HOST_KNOWS} False" in server.log.read_text(errors="replace")
    rows = assert_rows_are_bit_equal(read_rows(path), texts.rows)
    assert rows > 10000
    note("lengths on the device only", answers="10 of 10", rows=rows, rounds=rounds)


def test_retraction(servers, target, drafter, texts, tmp_path):
    path = tmp_path / "rows.jsonl"
    more = {**RETRACT, ROWS: str(path)}
    server = drafting(servers, "retract", target, drafter, texts, tmp_path, **more)
    rounds = assert_first_turns(server, texts)
    servers.stop("v4-retract")
    log = server.log.read_text(errors="replace")
    times = log.count("Testing retraction. #retracted_reqs: 1")
    assert times >= 3
    rows = assert_rows_are_bit_equal(read_rows(path), texts.rows)
    assert rows > 10000
    note("retraction", answers="10 of 10", rows=rows, times=times, rounds=rounds)


def test_chunked_prefill_without_overlap(servers, target, drafter, texts, tmp_path):
    plain = ("--chunked-prefill-size", "256", "--disable-overlap-schedule")
    server = drafting(servers, "chunks", target, drafter, texts, tmp_path, *plain)
    rounds = assert_first_turns(server, texts)
    assert_long(server, texts)
    servers.stop("v4-chunks")
    note("chunks of 256, overlap off", answers="11 of 11", rounds=rounds)


def test_a_windowed_drafter(servers, target, texts, tmp_path):
    draft = write_drafter(tmp_path / "draft", window=64)
    chunks = ("--chunked-prefill-size", "256")
    server = drafting(servers, "window", target, draft, texts, tmp_path, *chunks)
    rounds = assert_first_turns(server, texts)
    turns = ask(server, texts.second[0], TURN_TOKENS, "t")
    assert ids(turns) == texts.second[1]
    servers.stop("v4-window")
    note("windowed drafter, chunks of 256", answers="20 of 20", rounds=rounds)


def test_what_a_round_drafts_is_what_a_fresh_prefill_drafts(
    servers, target, drafter, texts, tmp_path
):
    """The draft K/V of rounds that were cut short equal those of the same text, prefilled."""
    path = tmp_path / "blocks.jsonl"
    more = {drafts.OWN_DRAFTS: str(path)}
    cold = ("--disable-radix-cache",)
    server = drafting(servers, "own", target, drafter, texts, tmp_path, *cold, **more)
    asked, answers = texts.first[0][3:8:2], texts.first[1][3:8:2]
    assert ids(ask(server, asked, NEW_TOKENS)) == answers
    rounds = own_blocks(path)
    compared = []
    for prompt, answer in zip(asked, answers, strict=True):
        rid, at = f"p{len(prompt)}", len(prompt)
        lengths = sorted(n for r, n in rounds if r == rid and at < n < at + NEW_TOKENS - 7)[::2]
        ask(server, [prompt + answer[: n - at] for n in lengths], 2, f"{rid}-")
        for n in lengths:
            assert own_blocks(path)[f"{rid}-{n}", n] == rounds[rid, n]
            compared.append(rounds[rid, n][1])
    servers.stop("v4-own")
    assert len(compared) >= 40
    assert_varied(compared)
    distinct = len(set(map(tuple, compared)))
    note("own drafts of rounds against a fresh prefill", equal=len(compared), distinct=distinct)


def test_two_ranks(servers, target, drafter, texts, tmp_path):
    """Sums over ranks round in their own way, so the reference has two ranks as well."""
    two = ("--tp-size", "2")
    (tmp_path / "plain").mkdir()
    server = start(servers, "tp2-none", target, tmp_path / "plain", *two)
    asked = texts.first[0][:6]
    answers = ids(ask(server, asked, NEW_TOKENS))
    servers.stop("v4-tp2-none")
    environment = known(tmp_path, asked, answers)
    arguments = (*two, *hyperdflash_arguments(drafter))
    server = start(servers, "tp2", target, tmp_path, *arguments, **environment)
    found = ask(server, asked, NEW_TOKENS)
    servers.stop("v4-tp2")
    assert ids(found) == answers
    assert min(accepted(found)) > 0, accepted(found)
    note("two ranks", answers="6 of 6", rounds=accepted(found))


def ask_seeded(server) -> Answers:
    """Sampled answers to prompts that no oracle knows: the drafts are the drafter's own."""
    asked = prompts(*LENGTHS[:6], seed=3)
    sampling = [
        {"temperature": 1, "top_p": 0.9, "sampling_seed": i, "max_new_tokens": TURN_TOKENS}
        for i in range(len(asked))
    ]
    sampling = [one | {"ignore_eos": True} for one in sampling]
    rids = [f"s{len(prompt)}" for prompt in asked]
    return ids(server.generate(timeout=1800, input_ids=asked, sampling_params=sampling, rid=rids))


@pytest.fixture(scope="module")
def seeded(servers, target, drafter, tmp_path_factory) -> Answers:
    """The same without any draft."""
    folder, arguments = tmp_path_factory.mktemp("v4-seeded"), hyperdflash_arguments(drafter)
    server = start(servers, "seeded", target, folder, *arguments, **{WIDTH: "1"})
    answers = ask_seeded(server)
    servers.stop("v4-seeded")
    return answers


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_random_width_every_round(servers, target, drafter, texts, seeded, tmp_path, overlap):
    """Rings and pages hold after rounds of 1, 2, 4 and 7 rows in any order."""
    path = tmp_path / "rows.jsonl"
    more = {ROWS: str(path), WIDTH: "random", WIDTHS: "1,2,4,7"}
    plain = () if overlap else ("--disable-overlap-schedule",)
    server = drafting(servers, "widths", target, drafter, texts, tmp_path, *plain, **more)
    answers = ask(server, texts.first[0], NEW_TOKENS)
    assert ids(answers) == texts.first[1]
    turns = ask(server, texts.second[0], TURN_TOKENS, "t")
    assert ids(turns) == texts.second[1]
    assert_long(server, texts)
    assert ask_seeded(server) == seeded
    servers.stop("v4-widths")
    caps = [a["meta_info"]["spec_cap_lens_histogram"] for a in answers]
    assert all(min(cap[w] for w in (1, 2, 4, 7)) > 0 for cap in caps), caps
    rows = assert_rows_are_bit_equal(read_rows(path), texts.rows)
    assert rows > 10000
    what = f"a random width every round, overlap {'on' if overlap else 'off'}"
    note(what, answers="21 of 21, seeded 6 of 6", rows=rows)
