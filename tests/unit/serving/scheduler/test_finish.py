"""A request ends inside a block where one-by-one decoding would end it."""

from __future__ import annotations

import inspect
import random
from array import array

import pytest
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hyperdflash.serving.scheduler import finish
from sglang_hyperdflash.serving.scheduler.finish import (
    finish_as_one_by_one,
    finish_token_by_token,
)
from sglang_hyperdflash.serving.verification import prefill

TEXT = "He sat on the mat; it is warm, the cat said.\nIs this the end? The sun is up again.\n"


def original(req: Req, n: int) -> None:
    """SGLang's own check: another test of this process may have put the hook into its function."""
    inspect.unwrap(Req.update_finish_state)(req, n)


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


def finished(tokenizer, tokens, blocks, check, grammar=None, **sampling):
    """Finish reason, emitted tokens, and what was said at the end, of a request fed in blocks."""
    params = SamplingParams(max_new_tokens=sampling.pop("max_new_tokens", 200), **sampling)
    params.normalize(tokenizer)
    req = Req("r", "", array("q", [5]), params, vocab_size=len(tokenizer))
    req.tokenizer, req.grammar, at = tokenizer, grammar, 0
    for size in blocks:
        block = tokens[at : at + size]
        at += len(block)
        if grammar is not None:
            accept = inspect.unwrap(SchedulerBatchResultProcessor._accept_grammar_tokens)
            block = accept(None, req, block)
        req.output_ids.extend(block)
        check(req, len(block))
        if req.finished() or at == len(tokens):
            break
    reason = req.finished_reason.to_json() if req.finished() else None
    return reason, list(req.output_ids_through_stop)


def ours_check(req, n):
    finish_token_by_token(original, req, n)


def case(draw: random.Random, tokenizer) -> tuple[list[int], dict]:
    """A text and a mix of stop conditions, many of which fall into one block."""
    words = TEXT.split(" ")
    draw.shuffle(words)
    tokens = tokenizer.encode(" ".join(words), add_special_tokens=False)
    strings = draw.sample(["\n", "is", "the", "at", "s ", "e cat", "?", "warm", "zzz"], 3)
    regexes = draw.sample([r"t[hi]", r"\.$", r"[A-Z]", r"s\W"], 1)
    sampling = draw.choice(
        [
            {"stop": strings},
            {"stop": strings, "stop_token_ids": draw.sample(tokens, 2)},
            {"stop_regex": regexes},
            {"stop": strings, "stop_regex": regexes, "stop_token_ids": draw.sample(tokens, 1)},
            {"stop": strings, "max_new_tokens": draw.randint(1, 20)},
            {"stop_token_ids": draw.sample(tokens, 2)},
        ]
    )
    return tokens, sampling


def test_any_mix_of_stops_ends_where_one_token_at_a_time_does(tokenizer):
    """Strings, regexes, tokens, EOS, a length and a grammar's end, several of them in a block."""
    draw = random.Random(0)
    reasons, differs, crowded = set(), 0, 0
    for _ in range(400):
        tokens, sampling = case(draw, tokenizer)
        if draw.random() < 0.3:
            tokens.insert(draw.randrange(len(tokens)), tokenizer.eos_token_id)
        if draw.random() < 0.1:
            tokens.insert(draw.randrange(len(tokens)), len(tokenizer))  # a broken row
        ends = draw.randint(1, len(tokens)) if draw.random() < 0.4 else None
        blocks = [draw.randint(1, 7) for _ in tokens]

        def run(blocks, check, tokens=tokens, ends=ends, sampling=sampling):
            grammar = None if ends is None else Grammar(ends)
            return finished(tokenizer, tokens, blocks, check, grammar, **sampling)

        expected = run([1] * len(tokens), original)
        assert run(blocks, ours_check) == expected, (sampling, blocks, ends)
        reasons.add((expected[0] or {}).get("type"))
        differs += run(blocks, original) != expected
        crowded += ends is not None and len(expected[1]) < ends < len(expected[1]) + 7
    assert reasons >= {"stop", "length"}
    assert differs > 20, "SGLang's own check was right: the seam is not needed"
    assert crowded > 10, "no block held a grammar's end and an earlier one"


@pytest.mark.parametrize(
    ("sampling", "decodes"),
    [
        ({}, 0),
        ({"stop_token_ids": [3]}, 0),
        ({"stop": ["zzz"]}, 1),
        ({"stop": ["zzz", "yyy"], "stop_token_ids": [3]}, 1),
        ({"stop_regex": ["zz+"]}, 6),
        ({"stop_regex": ["zz+", "yy+"], "stop": ["zzz"]}, 6),
    ],
)
def test_a_round_that_ends_nothing_decodes_its_tail_once(tokenizer, monkeypatch, sampling, decodes):
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)[:24]
    decode, calls = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda *given: calls.append(1) or decode(*given))
    reason, emitted = finished(tokenizer, tokens, [6] * 4, ours_check, **sampling)
    assert reason is None and emitted == tokens
    assert len(calls) == 4 * decodes


def test_the_earliest_string_wins_not_the_first_listed(tokenizer):
    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    sampling = {"stop": ["\n", "is", "the"]}
    reason, emitted = finished(tokenizer, tokens, [len(tokens)], ours_check, **sampling)
    assert reason["matched"] == "the"
    assert tokenizer.decode(emitted).endswith("the")
    wrong = finished(tokenizer, tokens, [len(tokens)], original, **sampling)
    assert wrong[0]["matched"] == "is"


def test_what_the_block_held_after_the_end_stays_for_the_cache(tokenizer):
    """SGLang frees K/V by what was accepted, not by what was emitted."""
    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    params = SamplingParams(max_new_tokens=50, stop=["the"])
    params.normalize(tokenizer)
    req = Req("r", "", array("q", [5]), params, vocab_size=len(tokenizer))
    req.tokenizer = tokenizer
    req.output_ids.extend(tokens)
    ours_check(req, len(tokens))
    assert list(req.output_ids) == tokens and 0 < req.finished_len < len(tokens)


@pytest.mark.parametrize("think_end", [3, 100])
@pytest.mark.parametrize("end", [1, 5, 7, 12])
def test_reasoning_is_counted_up_to_the_end_of_the_answer(tokenizer, end, think_end):
    """In blocks of seven as one by one: SGLang counts a block before it looks for its end."""

    def counted(size: int) -> int:
        params = SamplingParams(max_new_tokens=end)
        params.normalize(tokenizer)
        req = Req("r", "", array("q", [5]), params, vocab_size=len(tokenizer))
        req.tokenizer = tokenizer
        tokens = list(range(90, 120))
        for at in range(0, 28, size):
            block = tokens[at : at + size]
            req.output_ids.extend(block)
            req.update_reasoning_tokens(block, [90 + think_end])
            finish_as_one_by_one(original, req, len(block))
            if req.finished():
                break
        return req.reasoning_tokens

    assert counted(7) == counted(1) == min(end, think_end + 1)


def test_a_broken_row_ends_its_request_and_is_logged_once(tokenizer, monkeypatch, caplog):
    """SGLang's own finish, whatever was accepted before it; its id is not in the answer."""
    monkeypatch.setattr(finish, "_warned", False)
    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    for before in (0, 1, len(tokens)):
        run = [*tokens[:before], len(tokenizer)]

        def check(req, n):
            finish_as_one_by_one(original, req, n)

        reason, emitted = finished(tokenizer, run, [len(run)], check, stop_token_ids=[3])
        assert reason == {"type": "stop", "matched": "NaN happened"}
        assert emitted == [*run[:-1], 3]
    assert [f"output token {0}: the target's logits hold" in m for m in caplog.messages] == [True]


def test_other_algorithms_keep_sglangs_check(tokenizer, monkeypatch):
    monkeypatch.setattr(prefill, "_sampler", None)
    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    found = finished(tokenizer, tokens, [len(tokens)], ours_check, stop=["\n", "is", "the"])
    assert found[0]["matched"] == "is"


def test_a_grammar_speaks_of_the_last_token_only(tokenizer):
    class Done:
        def is_terminated(self):
            return True

    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    params = SamplingParams(max_new_tokens=50, stop=["zzz"])
    params.normalize(tokenizer)
    req = Req("r", "", array("q", [5]), params, vocab_size=len(tokenizer))
    req.tokenizer, req.grammar = tokenizer, Done()
    req.output_ids.extend(tokens)
    ours_check(req, len(tokens))
    assert req.finished() and list(req.output_ids_through_stop) == tokens
    assert isinstance(req.grammar, Done)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    """SGLang's own grammars, by regex."""
    backend = XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return backend.dispatch_regex


def test_a_broken_row_under_a_grammar_aborts_its_request_alone(tokenizer, grammars):
    """SGLang takes the id for one that the grammar forbids; its scheduler goes on."""
    tokens = tokenizer.encode("so the dog", add_special_tokens=False)
    for before in ([], tokens[:1], tokens):
        params = SamplingParams(max_new_tokens=50)
        params.normalize(tokenizer)
        req = Req("r", "", array("q", [5]), params, vocab_size=len(tokenizer))
        req.tokenizer, req.grammar = tokenizer, grammars("so the dog is.*")
        accept = inspect.unwrap(SchedulerBatchResultProcessor._accept_grammar_tokens)
        retained = accept(None, req, [*before, len(tokenizer)])
        req.output_ids.extend(retained)
        ours_check(req, len(retained))
        assert retained == before
        reason = req.finished_reason.to_json()
        assert reason["type"] == "abort" and reason["status_code"] == 500


def test_the_earliest_end_wins_under_a_grammar(tokenizer, grammars):
    """A stop, a length, or the end token that completes the grammar; later tokens are dropped."""
    tokens = tokenizer.encode("so the dog is", add_special_tokens=False)
    run = [*tokens, tokenizer.eos_token_id, tokens[0]]
    n = len(tokens)
    cases = [
        ({}, "stop", n + 1),
        ({"ignore_eos": True}, "stop", n + 1),
        ({"stop_token_ids": [tokens[-2]]}, "stop", n - 1),
        ({"stop": ["dog"]}, "stop", None),
        ({"stop_regex": ["d.g"]}, "stop", None),
        ({"max_new_tokens": n - 1}, "length", n - 1),
        ({"max_new_tokens": n + 1, "ignore_eos": True}, "length", n + 1),
        ({"max_new_tokens": 2, "stop": ["is"], "stop_token_ids": [tokens[-1]]}, "length", 2),
    ]
    for sampling, kind, length in cases:
        grammar = grammars("so the dog is")
        found = finished(tokenizer, run, [len(run)], ours_check, grammar, **sampling)
        ones = [1] * len(run)
        grammar = grammars("so the dog is")
        assert found == finished(tokenizer, run, ones, original, grammar, **sampling)
        assert found[0]["type"] == kind and found[1] == run[: len(found[1])]
        assert length is None or len(found[1]) == length
        if length is None:
            assert tokenizer.decode(found[1]).endswith("dog")
