"""The walk's target is encoded as a published DeepSeek-V4; the walk itself takes a quarter hour."""

from __future__ import annotations

import pytest

from sglang_hyperdflash.targets.chats import DeepSeekChats, load_chats
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.training.conversations import parse_conversation
from sglang_hyperdflash.training.local_target import BorrowedTarget
from tests.conftest import EXAMPLE


@pytest.fixture
def walk(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import walk

    return walk


def test_its_target_is_a_published_v4_that_fits_its_tokens(walk, tmp_path):
    walk.make_target(tmp_path / "target")
    chats, files = load_chats(str(tmp_path / "target")), TargetFiles(str(tmp_path / "target"))
    assert isinstance(chats, DeepSeekChats) and chats.tokenizer.chat_template is None
    facts = TargetFacts.from_config(files.config())
    target = BorrowedTarget(files)
    rows = target.embed_tokens.weight, target.lm_head.weight
    assert {len(each) for each in rows} == {facts.vocab_size} == {len(chats.tokenizer)}
    for added, like in walk.ADDED.items():
        ids = chats.tokenizer.convert_tokens_to_ids([added, like])
        assert ids[0] >= len(chats.tokenizer) - len(walk.ADDED)
        assert all((each[ids[0]] == each[ids[1]]).all() for each in rows)


def test_its_conversations_have_turns_reasoning_and_tools(walk, tmp_path):
    walk.make_target(tmp_path / "target")
    chats = load_chats(str(tmp_path / "target"))
    think, found = chats.tokenizer.convert_tokens_to_ids("<think>"), []
    for line in walk.chats(1):
        chat = parse_conversation(line, "here")
        tokens = chats.prompt(chat, "here")
        assert len(tokens) < 1200  # of 2,048, with an answer to come
        found.append((tokens[-1] == think, bool(chat.tools), len(chat.messages)))
    assert len(found) > 16
    assert {thinks for thinks, _, _ in found} == {tools for _, tools, _ in found} == {True, False}
    assert {count for _, _, count in found} == {2, 3}
