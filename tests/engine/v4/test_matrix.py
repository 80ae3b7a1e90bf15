"""What a server may do to a request on DeepSeek-V4, against no speculation; ``make v4-test``."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import requests

from eval.methods import resolve
from sglang_hyperdflash.serving.settings import RANDOM, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import conversation, flush, ids, reused
from tests.engine.drafters import assert_varied
from tests.engine.v4 import controls, drafts
from tests.engine.v4.checkpoint import write_drafter
from tests.engine.v4.conftest import LENGTHS, TALK, TALK_TOKENS, TOKENS, Texts
from tests.engine.v4.findings import note
from tests.engine.v4.plugin import DEVICE_LENGTHS
from tests.engine.v4.serve import Answers, accepted, ask, known, own_blocks, prompts, start
from tests.engine.v4.trace import ROWS, assert_rows_are_bit_equal, read_rows
from tests.gpu.readings import rounds_by_width

pytestmark = pytest.mark.v4
PAGE = 256
EVERY = ("first", "second", "long")
CHUNKS, NO_OVERLAP = ("--chunked-prefill-size", "256"), ("--disable-overlap-schedule",)
# SGLang's own switch: every thirtieth step gives up the newest request, which starts again later.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "30"}
RETRACTED = "Testing retraction. #retracted_reqs: 1"
EVERY_WIDTH = {WIDTH: RANDOM, WIDTHS: "1,2,3,4,5,6,7,8,9,10"}


@dataclass(frozen=True)
class Case:
    """A server and what it is asked for.

    Attributes:
        arguments: instead of a drafter's, where ``rival`` says so. draft: sizes of its drafter.
        log: what its log says, and at least how often. seeded: asks for sampled answers, too.
    """

    asked: tuple[str, ...] = ("first",)
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    draft: dict[str, int] = field(default_factory=dict)
    log: tuple[str, int] = ("V4: replacements are in place", 1)
    rival: bool = False
    seeded: bool = False


(_, MTP) = resolve(["baseline", "mtp6"], {}, {})
CASES = {
    "lengths on the device only": Case(
        environment={DEVICE_LENGTHS: "1"}, log=(f"{drafts.HOST_KNOWS} False", 1)
    ),
    # The most rows that SGLang's rings take.
    "blocks of ten, a random width every round, chunks of 256, retraction": Case(
        EVERY, CHUNKS, EVERY_WIDTH | RETRACT, {"block_size": 10}, (RETRACTED, 3), seeded=True
    ),
    "a random width every round, chunks of 256, overlap off": Case(
        EVERY, CHUNKS + NO_OVERLAP, {WIDTH: RANDOM, WIDTHS: "1,2,4,7"}, seeded=True
    ),
    "windowed drafter, chunks of 256": Case(("first", "second"), CHUNKS, draft={"window": 64}),
    "rejected states overwritten with NaN": Case(
        environment={controls.FAULT: controls.poison_rejected_states.__name__}
    ),
    "EAGLE with the target's MTP layer": Case(arguments=MTP.arguments, rival=True),
}


@dataclass
class Drafting:
    """A server with an oracle that knows every text, its rows of attention and its own drafts."""

    servers: object
    target: Path
    drafter: Path
    texts: Texts
    folder: Path
    case: Case

    def __post_init__(self) -> None:
        self.rows, self.blocks = self.folder / "rows.jsonl", self.folder / "blocks.jsonl"
        self.answers: dict[str, list[dict]] = {}
        case, environment = self.case, self.texts.oracle(self.folder) | self.case.environment
        environment |= {ROWS: str(self.rows), drafts.OWN_DRAFTS: str(self.blocks)}
        draft = write_drafter(self.folder / "draft", **case.draft) if case.draft else self.drafter
        arguments = case.arguments + (() if case.rival else hyperdflash_arguments(draft))
        given = (self.target, self.folder, *arguments)
        self.server = start(self.servers, "drafting", *given, **environment)

    def ask_all(self) -> None:
        for name in self.case.asked:
            batch, expected = self.texts.asked[name]
            self.answers[name] = ask(self.server, batch, TOKENS[name], name[0])
            assert ids(self.answers[name]) == expected, name
            assert sum(accepted(self.answers[name])[1:]) > 0, name

    def check(self, what: str, **numbers) -> None:
        """Stop it: every acceptance happened, and each row of attention is the target's."""
        self.servers.stop("v4-drafting")
        log = self.server.log.read_text(errors="replace")
        text, times = self.case.log
        assert log.count(text) >= times, text
        assert "not initialized from checkpoints" not in log
        answers = [answer for batch in self.answers.values() for answer in batch]
        rounds = accepted(answers)
        assert min(rounds) > 0 and len(rounds) == self.case.draft.get("block_size", 7), rounds
        if self.case.environment.get(WIDTH) == RANDOM:
            widths = map(int, self.case.environment[WIDTHS].split(","))
            assert rounds_by_width(answers).keys() == set(widths)
        assert_varied([block for _, block in own_blocks(self.blocks).values()])
        rows = assert_rows_are_bit_equal(read_rows(self.rows), self.texts.rows)
        reference = self.texts.count(*self.answers)
        assert rows >= 0.8 * reference, (rows, reference)
        count = len(answers)
        note(what, answers=f"{count} of {count}", rows=rows, reference_rows=reference,
             rounds=rounds, **numbers)  # fmt: skip


@pytest.fixture
def drafting(servers, target, drafter, texts: Texts, tmp_path):
    yield lambda case: Drafting(servers, target, drafter, texts, tmp_path, case)
    if "v4-drafting" in servers.running:
        servers.stop("v4-drafting")


@pytest.mark.parametrize("what", CASES)
def test_tokens_and_rows_are_those_of_no_speculation(drafting, request, what):
    drafted = drafting(CASES[what])
    drafted.ask_all()
    if CASES[what].seeded:
        assert ask_seeded(drafted.server) == request.getfixturevalue("seeded")
    drafted.check(what)


def test_the_poison_is_read_where_a_token_was_accepted(servers, target, drafter, texts, tmp_path):
    """So that rejected states may be NaN (a case of the matrix) is a finding."""
    batch, expected = texts.few()
    environment = known(tmp_path, batch, expected)
    environment[controls.FAULT] = controls.poison_an_accepted_state.__name__
    arguments = hyperdflash_arguments(drafter)
    server = start(servers, "fault", target, tmp_path, *arguments, **environment)
    with pytest.raises(requests.RequestException):
        ask(server, batch, len(expected[0]))
    servers.stop("v4-fault")
    assert "a compressed row that was never computed" in server.log.read_text(errors="replace")
    note("control: an accepted state overwritten with NaN", noticed=True)


def test_turns_page_hits_reuse_and_several_answers(drafting, texts: Texts):
    drafted = drafting(Case(EVERY))
    drafted.ask_all()
    server = drafted.server
    cached = [answer["meta_info"]["cached_tokens"] for answer in drafted.answers["second"]]
    assert max(cached) >= PAGE, cached
    prompt, answer = (part[4] for part in texts.asked["first"])
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "n": 3}
    several = server.generate(input_ids=prompt, sampling_params=sampling)
    assert ids(several) == [answer[:24]] * 3
    # A prefix counts while the K/V of its last window are left: as often as without speculation.
    flush(server)
    talk = conversation(server, TALK, TALK_TOKENS)
    assert ids(talk) == texts.asked["talk"][1]
    assert reused(talk) == texts.reused
    drafted.check("turns, page hits, top-k, n > 1", cached=cached)
    tokens, hits = map(list, zip(*reused(talk), strict=True))
    assert max(hits) >= 2 * PAGE
    rate = sum(hits) / sum(tokens)
    note("prefix reuse of a conversation", tokens=tokens, cached=hits, rate=rate)
    assert f"{drafts.HOST_KNOWS} False" not in server.log.read_text(errors="replace")


def test_what_a_round_drafts_is_what_a_fresh_prefill_drafts(drafting, texts: Texts):
    """The draft K/V of rounds that were cut short equal those of the same text, prefilled."""
    drafted = drafting(Case(arguments=("--disable-radix-cache",)))
    batch, answers = (part[3:8:2] for part in texts.asked["first"])
    assert ids(ask(drafted.server, batch, TOKENS["first"])) == answers
    rounds, compared = own_blocks(drafted.blocks), []
    for prompt, answer in zip(batch, answers, strict=True):
        rid, begin, end = f"f{len(prompt)}", len(prompt), len(prompt) + TOKENS["first"] - 7
        lengths = sorted(n for r, n in rounds if r == rid and begin < n < end)[::2]
        ask(drafted.server, [prompt + answer[: n - begin] for n in lengths], 2, f"{rid}-")
        fresh = own_blocks(drafted.blocks)
        for n in lengths:
            assert fresh[f"{rid}-{n}", n] == rounds[rid, n]
            compared.append(rounds[rid, n][1])
    drafted.servers.stop("v4-drafting")
    assert len(compared) >= 40
    assert_varied(compared)
    note("own drafts of rounds against a fresh prefill", equal=len(compared),
         distinct=len(set(map(tuple, compared))))  # fmt: skip


def test_two_ranks(servers, target, drafter, texts: Texts, tmp_path):
    """Sums over ranks round in their own way, so the reference has two ranks as well."""
    two, asked = ("--tp-size", "2"), texts.few()[0]
    server = start(servers, "tp2-none", target, tmp_path, *two)
    expected = ids(ask(server, asked, TOKENS["first"]))
    servers.stop("v4-tp2-none")
    environment = known(tmp_path, asked, expected)
    arguments = (*two, *hyperdflash_arguments(drafter))
    server = start(servers, "tp2", target, tmp_path, *arguments, **environment)
    answers = ask(server, asked, TOKENS["first"])
    servers.stop("v4-tp2")
    assert ids(answers) == expected
    rounds = accepted(answers)
    assert min(rounds) > 0 and len(rounds) == 7, rounds
    note("two ranks", answers="6 of 6", rounds=rounds)


def ask_seeded(server) -> Answers:
    """Sampled answers to prompts that no oracle knows: the drafts are the drafter's own."""
    batch = prompts(*LENGTHS[:6], seed=3)
    each = {"temperature": 1, "top_p": 0.9, "max_new_tokens": 60, "ignore_eos": True}
    sampling = [each | {"sampling_seed": i} for i in range(len(batch))]
    rids = [f"x{len(prompt)}" for prompt in batch]
    return ids(server.generate(timeout=1800, input_ids=batch, sampling_params=sampling, rid=rids))


@pytest.fixture(scope="module")
def seeded(servers, target, drafter, tmp_path_factory) -> Answers:
    """The same without any draft."""
    folder, arguments = tmp_path_factory.mktemp("v4-seeded"), hyperdflash_arguments(drafter)
    server = start(servers, "seeded", target, folder, *arguments, **{WIDTH: "1"})
    answers = ask_seeded(server)
    servers.stop("v4-seeded")
    return answers
