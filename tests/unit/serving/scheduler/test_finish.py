"""A request ends inside a block where one-by-one decoding would end it."""

import inspect
import random
from array import array
from functools import partial

import pytest
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hyperdflash.serving.scheduler import finish
from sglang_hyperdflash.serving.scheduler.finish import finish_as_one_by_one
from sglang_hyperdflash.serving.verification import prefill

TEXT = "He sat on the mat; it is warm, the cat said.\nIs this the end? The sun is up again.\n"


def original(req: Req, n: int) -> None:
    """SGLang's own check: another test of this process may have put the hook into its function."""
    inspect.unwrap(Req.update_finish_state)(req, n)


ours_check = partial(finish_as_one_by_one, original)


@pytest.fixture(scope="module")
def tokenizer(target_dir):
    return get_tokenizer(str(target_dir))


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(prefill, "_sampler", object())


class Grammar:
    """Terminates at its n-th token, which need not be a stop token."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def accept_token(self, token: int) -> None:
        self.left -= 1

    def is_terminated(self) -> bool:
        return self.left == 0


def request_of(tokenizer, grammar=None, **sampling) -> Req:
    params = SamplingParams(**{"max_new_tokens": 200} | sampling)
    params.normalize(tokenizer)
    req = Req("r", "", array("q", [5]), params, vocab_size=len(tokenizer))
    req.tokenizer, req.grammar = tokenizer, grammar
    return req


def feed(req: Req, tokens: list[int], blocks: list[int], check) -> tuple[dict | None, list[int]]:
    """Finish reason and emitted tokens of a request that is fed in blocks."""
    fed = kept = 0
    for size in blocks:
        block = tokens[fed : fed + size]
        fed += len(block)
        if req.grammar is not None:
            accept = inspect.unwrap(SchedulerBatchResultProcessor._accept_grammar_tokens)
            block = accept(None, req, block)
        req.output_ids.extend(block)
        kept += len(block)
        check(req, len(block))
        if req.finished() or fed == len(tokens):
            break
    assert len(req.output_ids) == kept, "K/V are freed by what was accepted, not what is emitted"
    reason = req.finished_reason.to_json() if req.finished() else None
    return reason, list(req.output_ids_through_stop)


def case(draw: random.Random, tokenizer) -> tuple[list[int], dict]:
    """A text and a mix of stop conditions, many of which fall into one block."""
    words = TEXT.split(" ")
    draw.shuffle(words)
    tokens = tokenizer.encode(" ".join(words), add_special_tokens=False)
    stops = ["\n", "is", "the", "at", "s ", "e cat", "?", "warm", "zzz"]
    every = {
        "stop": draw.sample(stops, 3),
        "stop_regex": draw.sample([r"t[hi]", r"\.$", r"[A-Z]", r"s\W"], 1),
        "stop_token_ids": draw.sample(tokens, 2),
        "max_new_tokens": draw.randint(1, 20),
    }
    return tokens, {name: every[name] for name in draw.sample(list(every), draw.randint(1, 3))}


def test_any_mix_of_stops_ends_where_one_token_at_a_time_does(tokenizer, monkeypatch, caplog):
    """Strings, regexes, tokens, EOS, a length and a grammar's end, several of them in a block.

    Of all broken rows the first alone is logged.
    """
    monkeypatch.setattr(finish, "_warned", False)
    draw = random.Random(0)
    reasons, differs, crowded = set(), 0, 0
    for _ in range(300):
        tokens, sampling = case(draw, tokenizer)
        if draw.random() < 0.3:
            tokens.insert(draw.randrange(len(tokens)), tokenizer.eos_token_id)
        if draw.random() < 0.1:
            tokens.insert(draw.randrange(len(tokens)), len(tokenizer))  # a broken row
        ends = draw.randint(1, len(tokens)) if draw.random() < 0.4 else None
        blocks = [draw.randint(1, 7) for _ in tokens]

        def run(blocks, check, tokens=tokens, ends=ends, sampling=sampling):
            grammar = None if ends is None else Grammar(ends)
            return feed(request_of(tokenizer, grammar, **sampling), tokens, blocks, check)

        expected = run([1] * len(tokens), original)
        assert run(blocks, ours_check) == expected, (sampling, blocks, ends)
        reasons |= {(expected[0] or {}).get(name) for name in ("type", "matched")}
        differs += run(blocks, original) != expected
        crowded += ends is not None and len(expected[1]) < ends < len(expected[1]) + 7
    assert reasons >= {"stop", "length", finish.NAN_MATCHED} and len(caplog.messages) == 1
    assert differs > 15, "SGLang's own check was right: the seam is not needed"
    assert crowded > 5, "no block held a grammar's end and an earlier one"


def test_other_algorithms_keep_sglangs_own_check(tokenizer, monkeypatch):
    """Which takes the first string that is listed, not the earliest in the block."""
    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    for sampler, matched in ((object(), "the"), (None, "is")):
        monkeypatch.setattr(prefill, "_sampler", sampler)
        req = request_of(tokenizer, stop=["\n", "is", "the"])
        reason, _ = feed(req, tokens, [len(tokens)], ours_check)
        assert reason["matched"] == matched


@pytest.mark.parametrize("end, think_end", [(1, 100), (5, 3), (12, 3), (12, 100)])
def test_reasoning_is_counted_up_to_the_end_of_the_answer(tokenizer, end, think_end):
    """In blocks of seven as one by one: SGLang counts a block before it looks for its end."""

    def counted(size: int) -> int:
        req = request_of(tokenizer, max_new_tokens=end)

        def check(req, n):
            req.update_reasoning_tokens(list(req.output_ids[-n:]), [90 + think_end])
            ours_check(req, n)

        feed(req, list(range(90, 118)), [size] * 28, check)
        return req.reasoning_tokens

    assert counted(7) == counted(1) == min(end, think_end + 1)


def test_a_broken_row_under_a_grammar_aborts_its_request_alone(tokenizer):
    """SGLang takes the id for one that the grammar forbids; its scheduler goes on."""
    backend = XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    tokens = tokenizer.encode("so the dog", add_special_tokens=False)
    for before in ([], tokens[:1], tokens):
        req = request_of(tokenizer, backend.dispatch_regex("so the dog is.*"))
        run = [*before, len(tokenizer)]
        reason, _ = feed(req, run, [len(run)], ours_check)
        assert list(req.output_ids) == before
        assert reason["type"] == "abort" and reason["status_code"] == 500
