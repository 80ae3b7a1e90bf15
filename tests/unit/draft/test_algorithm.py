"""The page that explains the algorithm: the target's answer, and tau as the trainer counts it."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from sglang_hyperdflash.draft.algorithm import decode, greedy, propose_block
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


@pytest.fixture(scope="module")
def drafter(drafter_dir):
    return Drafter.load(drafter_dir).eval()


@pytest.fixture(scope="module")
def decoded(target, prompt, drafter) -> tuple[list[int], list[int]]:
    """An answer of 32 tokens and its histogram."""
    return decode(target, partial(propose_block, target, drafter), prompt, 32, None)


def test_the_answer_is_the_targets_and_tau_is_the_trainers(target, prompt, drafter, decoded):
    answer, histogram = decoded
    assert len(answer) == 32
    assert greedy(target, prompt + answer)[len(prompt) - 1 : -1].tolist() == answer
    assert sum(histogram) > 5 and sum(histogram[1:]) > 3, "drafts must be accepted to say anything"
    sample = Sample.continuation(prompt + answer, len(prompt))
    cache = FeatureCache(target, [sample], dtype=torch.float32)
    replayed = Replay(drafter, target).acceptance(cache)
    histogram = histogram + [0] * (7 - len(histogram))
    left_out = [a - b for a, b in zip(histogram, replayed, strict=True)]
    # The trainer leaves out the rounds whose block the answer's end cuts: its last seven tokens.
    assert min(left_out) >= 0 and sum((1 + i) * n for i, n in enumerate(left_out)) <= 7


@pytest.mark.parametrize("right", [0, 3, 6])
def test_any_drafts_give_the_same_answer(target, prompt, decoded, right):
    """Drafts of which a prefix is right: as many are accepted, and not one token changes."""
    expected = decoded[0]

    def propose(tokens: list[int]) -> list[int]:
        known = expected[len(tokens) - len(prompt) :][:6]
        return known[:right] + [(token + 1) % 1024 for token in known[right:]]

    answer, histogram = decode(target, propose, prompt, 16, None)
    assert answer == expected[:16]
    assert histogram[right] >= 16 // (right + 1) - 1


def test_a_stop_token_ends_the_answer_inside_a_block(target, prompt, decoded):
    expected = decoded[0]
    end = next(i for i, token in enumerate(expected) if i > 3 and token not in expected[:i])

    def propose(tokens: list[int]) -> list[int]:
        return expected[len(tokens) - len(prompt) :][:6]

    answer, _ = decode(target, propose, prompt, 32, expected[end])
    assert answer == expected[: end + 1] and end % 7
