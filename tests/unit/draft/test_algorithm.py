"""The page that explains the algorithm: the target's answer, and tau as the trainer counts it."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from sglang_hyperdflash.draft.algorithm import decode, greedy, propose_block
from sglang_hyperdflash.tools.acceptance import accept_length
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample
from tests.conftest import EXAMPLE


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


@pytest.fixture(scope="module")
def prompt(target_dir) -> list[int]:
    from transformers import AutoTokenizer

    messages = json.loads((EXAMPLE / "prompts.jsonl").read_text().splitlines()[0])["messages"]
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def one_by_one(target, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(greedy(target, tokens)[-1]))
    return tokens[len(prompt) :]


def test_the_answer_is_the_targets_and_tau_is_the_trainers(target, prompt, drafter_dir):
    drafter = Drafter.load(drafter_dir).eval()
    answer, histogram = decode(target, partial(propose_block, target, drafter), prompt, 48, None)
    assert answer == one_by_one(target, prompt, 48)
    assert sum(histogram) > 5 and sum(histogram[1:]) > 3, "drafts must be accepted to say anything"
    sample = Sample.continuation(prompt + answer, len(prompt))
    replayed = Replay(drafter, target).acceptance(
        FeatureCache(target, [sample], dtype=torch.float32)
    )
    histogram += [0] * (7 - len(histogram))
    left_out = [a - b for a, b in zip(histogram, replayed, strict=True)]
    # The trainer leaves out the rounds whose block the answer's end cuts: its last seven tokens.
    assert min(left_out) >= 0 and sum((1 + i) * n for i, n in enumerate(left_out)) <= 7
    assert accept_length(sum(i * n for i, n in enumerate(histogram)), sum(histogram)) > 1.5


@pytest.mark.parametrize("right", [0, 3, 6])
def test_any_drafts_give_the_same_answer(target, prompt, right):
    """Drafts of which a prefix is right: as many are accepted, and not one token changes."""
    expected = one_by_one(target, prompt, 24)

    def propose(tokens: list[int]) -> list[int]:
        at = len(tokens) - len(prompt)
        known = (expected + [0] * 6)[at : at + 6]
        return known[:right] + [(t + 1) % 1024 for t in known[right:]]

    answer, histogram = decode(target, propose, prompt, 24, None)
    assert answer == expected
    assert histogram[right] >= 24 // (right + 1) - 1


def test_a_stop_token_ends_the_answer_inside_a_block(target, prompt):
    expected = one_by_one(target, prompt, 24)
    stop = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])

    def propose(tokens: list[int]) -> list[int]:
        at = len(tokens) - len(prompt)
        return (expected + [0] * 6)[at : at + 6]

    answer, _ = decode(target, propose, prompt, 24, stop)
    assert answer == expected[: expected.index(stop) + 1]
