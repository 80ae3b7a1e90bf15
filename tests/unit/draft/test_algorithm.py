"""The page that explains the algorithm: the target's answer, whatever is drafted.

``tests/unit/training/test_replay.py`` compares the trainer's drafts and rounds with it.
"""

from __future__ import annotations

import json
from functools import partial

import pytest

from sglang_hyperdflash.draft.algorithm import decode, greedy, propose_block
from sglang_hyperdflash.targets.chats import Chat, load_chats
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


@pytest.fixture(scope="module")
def prompt(target_dir) -> list[int]:
    messages = json.loads((EXAMPLE / "prompts.jsonl").read_text().splitlines()[0])["messages"]
    return load_chats(str(target_dir)).prompt(Chat(messages), "here")


@pytest.fixture(scope="module")
def decoded(target, prompt, drafter_dir) -> tuple[list[int], list[int]]:
    """An answer of 32 tokens and its histogram."""
    drafter = Drafter.load(drafter_dir).eval()
    return decode(target, partial(propose_block, target, drafter), prompt, 32, None)


def test_the_answer_is_the_targets(target, prompt, decoded):
    answer, histogram = decoded
    assert len(answer) == 32
    assert greedy(target, prompt + answer)[len(prompt) - 1 : -1].tolist() == answer
    assert sum(histogram) > 5 and sum(histogram[1:]) > 3, "drafts must be accepted to say anything"


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
