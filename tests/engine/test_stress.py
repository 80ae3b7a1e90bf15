"""Random widths, chunked prompts, retractions, processors and failing grammars on one server."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch

from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, ROUNDS, WIDTH_ROUNDS
from sglang_hyperdflash.serving.settings import RANDOM, WIDTH, WIDTHS
from sglang_hyperdflash.tools.acceptance import drafted_positions
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine import asking, conftest, probes
from tests.engine.asking import ASKED, FEW, PROCESSED, UNPROCESSED
from tests.engine.conftest import NEW_TOKENS, greedy, greedy_all, greedy_together, ids, retractions
from tests.engine.test_train_and_serve import compare_drafts
from tests.waiting import until

# ``fail:METHOD:N`` in a grammar: its N-th call of METHOD fails, SGLang's own masks uncounted.
FAILING = """
import re, sys

def load():
    from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    for kind in (GuidanceGrammar, XGrammarGrammar):
        for method in ("fill_vocab_mask", "accept_token", "rollback"):
            wrap(kind, method)

def wrap(kind, method):
    original = getattr(kind, method)

    def call(self, *args):
        text = getattr(self, "key_string", None) or self.serialized_grammar
        planted = re.search(f"fail:{method}:([0-9]+)", text)
        # In SGLang's pass over a mixed batch an error ends the server.
        if planted and sys._getframe(1).f_code.co_name != "fill_vocab_mask_batched":
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == int(planted[1]):
                raise ValueError("planted")
        return original(self, *args)

    setattr(kind, method, call)
"""
TEXT = r"[ -~\n]*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stress")


@pytest.fixture(
    scope="module", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)]
)
def server(request, servers, target_dir, drafter_dir, folder):
    environment = {WIDTH: RANDOM, WIDTHS: "1,2,4,7"} | conftest.probed(folder, probes.BLOCKS)
    for name, source in {"optimistic": conftest.OPTIMISTIC, "failing": FAILING}.items():
        environment |= conftest.install_plugin(folder, name, source)
    arguments = (*conftest.FP32, *conftest.SMALL_POOL, conftest.PROCESSORS, "--enable-metrics")
    arguments += ("--enable-mixed-chunk", "--chunked-prefill-size", "32")
    arguments += ("--grammar-backend", request.param, *hyperdflash_arguments(drafter_dir))
    name = f"stress-{request.param}"
    yield servers.get(name, target_dir, *arguments, environment=environment)
    servers.stop(name)


def caps_of(answer: dict) -> list[int]:
    """Rounds by their width, from 0 to 7."""
    found = answer["meta_info"]["spec_cap_lens_histogram"]
    return found + [0] * (8 - len(found))


def test_greedy_answers(server, own_prompts, own_reference):
    before = retractions(server)
    answers = greedy_together(server, own_prompts)
    assert ids(answers) == own_reference
    assert retractions(server) > before
    caps = [sum(column) for column in zip(*map(caps_of, answers), strict=True)]
    assert [width for width, rounds in enumerate(caps) if rounds] == [1, 2, 4, 7], caps
    longer = [p + r[:24] for p, r in zip(own_prompts, own_reference, strict=True)]
    found = ids(greedy_all(server, longer, 12))
    assert [a[: NEW_TOKENS - 24] for a in found] == [r[24:] for r in own_reference]


def shared(server: Server, names: Iterable[str]) -> list[str]:
    """llguidance reads JSON schemas and EBNF otherwise than the baseline."""
    differ = {name for name, setting in ASKED.items() if {"json_schema", "ebnf"} & setting.keys()}
    differ |= {"all and processor"}
    return [name for name in names if "xgrammar" in server.log.name or name not in differ]


@pytest.mark.parametrize("names", [FEW, pytest.param(UNPROCESSED, marks=pytest.mark.slow)])
def test_answers_are_the_baselines(server, own_prompts, baseline, names):
    asking.assert_cases(server, shared(server, (*names, "regex")), own_prompts, baseline)


def test_a_processor_is_called_once_a_token(server, own_prompts, baseline):
    """A draft, rejected or not, would be one call more."""
    asking.assert_cases(server, shared(server, PROCESSED), own_prompts, baseline)


def test_retraction_changes_nothing(server, own_prompts, baseline):
    """Long seeded, filtered, penalised and greedy answers, and prompts that come in chunks."""
    before = retractions(server)
    parameters = [one["sampling_params"] for one in asking.payloads("mixed", own_prompts)]
    found = asking.together(server, own_prompts, parameters)
    assert found == [choices[0]["ids"] for choices in baseline["mixed"]]
    assert retractions(server) > before


def test_requests_hold_while_others_prompts_are_computed(server, own_prompts, baseline):
    """A grammar's and other kinds by turns, each with a long prompt, a chunk at a time."""
    chosen = [("regex", 0), ("penalties", 4), ("regex", 1), ("repetition", 5), ("regex", 2)]
    prompts, parameters = [], []
    for i, (name, number) in enumerate(chosen):
        short = asking.payloads(name, own_prompts)[number]
        long = [t for p in own_prompts[i:] + own_prompts[:i] for t in p][:400]
        prompts += [short["input_ids"], long]
        parameters += [short["sampling_params"], asking.sampled(i, max_new_tokens=2)]
    tokens = asking.together(server, prompts, parameters)[::2]
    assert tokens == [baseline[name][number][0]["ids"] for name, number in chosen]


def test_drafting_stops_while_a_custom_processor_is_in_the_batch(server, own_prompts, baseline):
    """Plain requests run blocks, then single rows with a processor's request, then blocks again."""
    plain = [asking.sampled(i, temperature=0, max_new_tokens=96) for i in range(3)]
    short = asking.payloads("greedy processor", own_prompts)[3]
    met = []

    def ask_plain() -> list[dict]:
        return server.generate(input_ids=own_prompts[:3], sampling_params=plain)

    def ask_both() -> None:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask_plain)
            for _ in range(2):  # at several points of the plain answers
                answer = server.generate(**short)
                assert answer["output_ids"] == baseline["greedy processor"][3][0]["ids"]
                assert answer["meta_info"]["spec_num_correct_drafts"] == 0
            found = running.result()
        assert [a["output_ids"] for a in found] == baseline["long"][:3]
        assert min(a["meta_info"]["spec_num_correct_drafts"] for a in found) > 0
        met.append(any(a["meta_info"]["spec_verify_ct"] > 30 for a in found))

    until(lambda: any(met), meanwhile=ask_both)  # a slow client's request may come too late


def test_every_block_reads_its_own_request_alone(
    server, target_dir, drafter_dir, own_prompts, folder
):
    """It is the trainer's: slots are used again, prompts come in chunks, prefixes are cached."""
    log, prompts = folder / "blocks.jsonl", own_prompts[:6]
    compare_drafts(server, log, target_dir, drafter_dir, prompts, 48, turns=4, least=30)


def test_metrics_count_the_drafts_of_narrow_rounds(server, own_prompts):
    def counted() -> torch.Tensor:
        """Accepted and drafted tokens by position."""
        both = [asking.by_label(server, family, "position") for family in (ACCEPTED, DRAFTED)]
        return torch.tensor([[one[str(k)] for k in range(1, 7)] for one in both])

    rounds, before = sum(asking.samples(server, ROUNDS).values()), counted()
    found = greedy_all(server, own_prompts[:6], 6)
    accepted, drafted = (counted() - before).tolist()
    histograms = [a["meta_info"]["spec_correct_drafts_histogram"] for a in found]
    assert accepted == [sum(sum(h[k:]) for h in histograms) for k in range(1, 7)]
    caps = [sum(column) for column in zip(*map(caps_of, found), strict=True)]
    assert drafted == drafted_positions(caps, 6) == [sum(caps[k + 1 :]) for k in range(1, 7)]
    assert sum(asking.samples(server, ROUNDS).values()) - rounds == sum(caps) > drafted[0]
    assert set(asking.by_label(server, WIDTH_ROUNDS, "width")) == {"1", "2", "4", "7"}
    for answer, histogram in zip(found, histograms, strict=True):
        details, caps = answer["meta_info"], caps_of(answer)
        correct = sum(i * n for i, n in enumerate(histogram))
        proposed = sum(width * n for width, n in enumerate(caps)) - sum(caps)
        assert details["spec_num_correct_drafts"] == correct
        assert details["spec_num_proposed_drafts"] == proposed > 0
        assert details["spec_accept_rate"] == pytest.approx(correct / proposed)
        assert details["spec_verify_ct"] == sum(caps) == sum(histogram)


def ask(server, prompt: list[int], **sampling) -> requests.Response:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **sampling}
    return asking.post(server, "/generate", {"input_ids": prompt, "sampling_params": sampling})


@pytest.mark.slow
def test_a_matcher_in_error_ends_its_request_and_no_other(server, own_prompts, own_reference):
    """At every position of a block, in the rounds after it, and where no token is possible."""
    constrained = ask(server, own_prompts[0], regex=TEXT).json()["output_ids"]
    calls = {"fill_vocab_mask": range(1, 12), "accept_token": range(2, 12), "rollback": range(2, 4)}
    bad = [
        {"regex": f"{TEXT}|fail:{method}:{number}"}
        for method, numbers in calls.items()
        for number in numbers
    ]
    # The end is all that this grammar allows, and min_new_tokens forbids it.
    bad += [{"regex": "yes|no", "min_new_tokens": 3, "ignore_eos": False}] * 3
    with ThreadPoolExecutor(4) as pool:
        healthy = pool.submit(greedy_all, server, own_prompts[:6], 2)
        codes = list(pool.map(lambda one: ask(server, own_prompts[0], **one).status_code, bad))
        assert codes == [500] * len(bad)
        assert ids(healthy.result()) == own_reference[:6]
    assert ask(server, own_prompts[0], regex=TEXT).json()["output_ids"] == constrained
    assert greedy(server, own_prompts[1])["output_ids"] == own_reference[1]
