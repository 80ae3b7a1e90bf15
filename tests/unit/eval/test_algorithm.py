"""The page that explains the algorithm: the target's answer, whatever is drafted."""

import json

import pytest

from eval.algorithm import decode, greedy
from sglang_hyperdflash.targets.chats import Chat, load_chats
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE


@pytest.mark.parametrize("right", [0, 3, 6])
def test_any_drafts_give_the_targets_answer_up_to_its_end(target_dir, right):
    """Drafts of which a prefix is right: as many are accepted, and not one token changes."""
    messages = json.loads((EXAMPLE / "prompts.jsonl").read_text().splitlines()[0])["messages"]
    prompt = load_chats(str(target_dir)).prompt(Chat(messages), "here")
    target, tokens = LocalTarget(target_dir), list(prompt)
    for _ in range(32):
        tokens.append(int(greedy(target, tokens)[-1]))
    expected = tokens[len(prompt) :]

    def propose(tokens: list[int]) -> list[int]:
        drafts = expected[len(tokens) - len(prompt) :][:6]
        return drafts[:right] + [(token + 1) % 1024 for token in drafts[right:]]

    answer, histogram = decode(target, propose, prompt, 16, None)
    assert answer == expected[:16]
    assert histogram[right] >= 16 // (right + 1) - 1
    end = next(i for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    answer, _ = decode(target, propose, prompt, 32, expected[end])
    assert answer == expected[: end + 1] and (end % 7 or right < 6)
