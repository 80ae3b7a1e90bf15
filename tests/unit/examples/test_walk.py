"""The two demonstrations that a reader runs: the learning demo's numbers, the walk's target."""

from types import SimpleNamespace

from eval.client import Answer
from sglang_hyperdflash.targets.chats import DeepSeekChats, load_chats
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.training.conversations import parse_conversation
from sglang_hyperdflash.training.local_target import BorrowedTarget


def test_the_learning_demo_counts_whole_minutes_and_draws_them(script, monkeypatch):
    demo = script("learn_demo")

    def request(ended, tokens, drafts, rounds):
        counts = {"correct_drafts": drafts, "verify_rounds": rounds}
        return demo.Request(ended, ["?"], Answer(output_ids=[list(range(tokens))], **counts))

    asked = [request(110, 60, 20, 40), request(130, 60, 40, 20), request(190, 120, 90, 30)]
    asked.append(request(225, 5, 0, 5))  # of a minute that is not over
    minutes = demo.by_minute(asked, 100)
    assert minutes == [
        {"minute": 1, "tau": 2.0, "tokens_per_second": 2.0},
        {"minute": 2, "tau": 4.0, "tokens_per_second": 2.0},
    ]
    result = {"minutes": minutes, "turned_at_minute": 0.5, "published_minutes": {"1": 0.2}}
    result |= {"baseline_tokens_per_second": 1.0, "baseline_next_to_learn": 0.5}
    result |= {"poisoned_version": {"minute": 0.8}}
    assert "axes_2" in demo.svg("learning", "dark", {"learning": result})
    assert not set(demo.SEEN) & set(demo.UNSEEN)
    assert {*demo.SEEN, *demo.UNSEEN} < set(demo.FAMILIES)
    lines = (
        "# HELP hyperdflash:drafter_version Number of the drafter",
        'hyperdflash:drafter_version{model_name="x"} 3.0',
        'hyperdflash:width_rounds_total{width="3"} 9.0',
    )
    reply = SimpleNamespace(text="\n".join(lines))
    monkeypatch.setattr(demo.requests, "get", lambda *_, **__: reply)
    assert demo.version_in_use("http://x") == 3


def test_the_walk_s_target_is_a_published_v4_whose_chats_fit_it(script, tmp_path):
    walk, folder = script("walk"), str(tmp_path / "target")
    walk.make_target(tmp_path / "target")
    chats, files = load_chats(folder), TargetFiles(folder)
    assert isinstance(chats, DeepSeekChats) and chats.tokenizer.chat_template is None
    target, vocabulary = BorrowedTarget(files), len(chats.tokenizer)
    rows = target.embed_tokens.weight, target.lm_head.weight
    assert {len(each) for each in rows} == {vocabulary}
    assert TargetFacts.from_config(files.config()).vocab_size == vocabulary
    for pair in walk.ADDED.items():
        added, like = chats.tokenizer.convert_tokens_to_ids(list(pair))
        assert added >= vocabulary - len(walk.ADDED)
        assert all((each[added] == each[like]).all() for each in rows)
    think, kinds = chats.tokenizer.convert_tokens_to_ids("<think>"), []
    for line in walk.chats(1):
        chat = parse_conversation(line, "here")
        tokens = chats.prompt(chat, "here")
        assert len(tokens) < 1200  # of 2,048, with an answer to come
        kinds.append((tokens[-1] == think, bool(chat.tools), len(chat.messages)))
    assert len(kinds) > 16
    assert [set(values) for values in zip(*kinds, strict=True)] == [{True, False}] * 2 + [{2, 3}]
