"""Chat data to samples: every accepted form, the assistant mask, and bad data's messages."""

from __future__ import annotations

import copy
import json

import pytest

from sglang_hyperdflash.targets.chats import Chat, TemplateChats, load_chats
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.training.conversations import (
    chat_samples,
    joined,
    line_samples,
    load_samples,
    parse_conversation,
    read_conversations,
)
from tests.unit.targets.published_v4 import published_v4

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6."},
]


@pytest.fixture(scope="module")
def chats(target_dir):
    return load_chats(str(target_dir))


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT[1:3]},
        {
            "conversations": [
                {"from": "human", "value": "What is 2 + 2?"},
                {"from": "gpt", "value": "It is 4."},
            ]
        },
        {"conversations": CHAT[1:3]},
        {"instruction": "What is 2 + 2?", "output": "It is 4."},
    ],
)
def test_every_form_gives_the_same_conversation(record):
    assert parse_conversation(record, "here") == Chat(CHAT[1:3])


def test_a_hub_data_set_is_streamed(monkeypatch, chats):
    import datasets

    asked = []

    def load_dataset(name, *, split, streaming):
        asked.append((name, split, streaming))
        if name == "owner/gone":
            raise ConnectionError("offline")
        return iter([{"conversations": CHAT, "id": 3}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_conversations("hub:owner/name")) == [(Chat(CHAT), "hub:owner/name, row 1")]
    assert len(load_samples(["hub:owner/name:test"], chats, 512).samples) == 1
    assert asked == [("owner/name", "train", True), ("owner/name", "test", True)]
    with pytest.raises(FileNotFoundError, match="owner/gone cannot be read from the hub: offline"):
        list(read_conversations("hub:owner/gone"))


def test_turns_are_prompts_without_answers(chats):
    chat = parse_conversation({"turns": ["one", "two"]}, "here")
    assert [m["role"] for m in chat.messages] == ["user", "user"]
    assert chat_samples(chats, chat, "here") == []


def test_the_spans_are_the_answers_and_their_end_tokens(chats):
    (sample,) = chat_samples(chats, Chat(CHAT), "here")
    tokenizer = chats.tokenizer
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(sample.tokens) == whole
    answers = [tokenizer.decode(sample.tokens[a:b]) for a, b in sample.spans]
    end = tokenizer.eos_token
    assert answers == [f"It is 4.{end}", f"It is 6.{end}"]
    assert sample.answer_tokens == sum(b - a for a, b in sample.spans)


def test_what_follows_the_last_answer_is_left_out(chats):
    trailing = Chat([*CHAT, {"role": "user", "content": "Thanks"}])
    assert chat_samples(chats, trailing, "here") == chat_samples(chats, Chat(CHAT), "here")


def test_long_and_unanswered_conversations_are_counted(chats, tmp_path):
    path = write(
        tmp_path / "data.jsonl",
        {"messages": CHAT},
        {"turns": ["hello"]},
        {"instruction": "Count", "output": "1 " * 500},
    )
    loaded = load_samples([path], chats, max_length=100)
    assert (len(loaded.samples), len(loaded.places)) == (1, 1)
    assert (len(loaded.without_answer), len(loaded.too_long)) == (1, 1)
    assert all(str(path) in where for where in (*loaded.without_answer, *loaded.too_long))
    assert "left out 1 over the length limit and 1 without an answer" in str(loaded)
    with pytest.raises(HyperDFlashConfigError, match=r"no samples in .* raise max_length \(5\)"):
        load_samples([path], chats, max_length=5)


def test_regenerated_lines_keep_their_exact_tokens(chats, tmp_path):
    first = {"tokens": [5, 6, 7, 8], "spans": [[2, 4]]}
    second = {"tokens": [5, 6, 7, 8, 9, 10], "spans": [[5, 6]]}
    path = write(tmp_path / "data.jsonl", {"messages": CHAT, "samples": [first, second]})
    loaded = load_samples([path], chats, max_length=5)
    assert [(s.tokens, s.spans) for s in loaded.samples] == [([5, 6, 7, 8], ((2, 4),))]
    assert (len(loaded.without_answer), len(loaded.too_long)) == (0, 1)
    for bad in (
        {"tokens": [1]},
        {"tokens": ["x"], "spans": []},
        {"tokens": [1], "spans": [[0, 2]]},
    ):
        path = write(tmp_path / "bad.jsonl", {"samples": [bad]})
        with pytest.raises(HyperDFlashConfigError, match=r"bad.jsonl:1: (samples must hold|spans)"):
            load_samples([path], chats, max_length=5)


def test_samples_that_are_no_list_are_named(chats, tmp_path):
    path = write(tmp_path / "data.jsonl", {"samples": 5})
    message = r"data.jsonl:1: samples must be a non-empty list, found 5\. Fix or remove this line"
    with pytest.raises(HyperDFlashConfigError, match=message):
        load_samples([path], chats, max_length=5)


def test_a_template_that_is_missing_or_refuses_is_one_line(chats, tmp_path):
    """Found as: transformers' and jinja's tracebacks."""
    path = write(tmp_path / "data.jsonl", {"instruction": "a", "output": "b"})
    other = TemplateChats(copy.deepcopy(chats.tokenizer))
    other.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    message = r"data.jsonl:1: the target's chat template refuses .*: roles must alternate\. Fix"
    with pytest.raises(HyperDFlashConfigError, match=message):
        load_samples([path], other, max_length=5)
    other.tokenizer.chat_template = None
    with pytest.raises(HyperDFlashConfigError, match=r"has no chat template, .* Add a chat_templ"):
        load_samples([path], other, max_length=5)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"data.jsonl:1: expected a JSON object"),
        ("[1]", r"data.jsonl:1: expected a JSON object"),
        ("{}", "found nothing"),
        ('{"text": "x"}', "needs messages, conversations, instruction and output, or turns"),
        ('{"messages": []}', "messages must be a non-empty list"),
        ('{"messages": [{"role": "user"}]}', "must have role and content"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "role 'bot' is not one of"),
        (
            '{"messages": [{"role": "tool", "content": null}]}',
            "be text, found null of the tool",
        ),
        (
            '{"messages": [{"role": "gpt", "tool_calls": [1]}]}',
            "tool call must have a function",
        ),
        ('{"turns": ["a"], "tools": {"name": "b"}}', "tools must be a list of objects with a func"),
        ('{"turns": ["a"], "tools": "[{"}', "tools must be a list of objects with a function"),
        ('{"turns": ["a"], "chat_template_kwargs": [1]}', "chat_template_kwargs must be an object"),
        ('{"conversations": [{"from": "bot", "value": "x"}]}', "role 'bot' is not one of"),
        ('{"turns": [1]}', "every message must be text, found 1 of the user"),
        ('{"instruction": null, "output": "x"}', "must be text, found null of the user"),
        ('{"instruction": null, "input": "y", "output": "x"}', "must be text, found null"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "is not one of"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(HyperDFlashError, match=message):
        list(read_conversations(path))


def test_empty_and_missing_files_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(HyperDFlashConfigError, match=r"empty.jsonl is empty"):
        list(read_conversations(tmp_path / "empty.jsonl"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        list(read_conversations(tmp_path / "none.jsonl"))


class Template:
    """A tokenizer whose chat template is a Python function; tokens are characters."""

    chat_template, eos_token_id = "a function", ord("|")

    def __init__(self, render):
        self.render = render

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt):
        assert not tokenize and tools is None
        return self.render(messages, add_generation_prompt)

    def encode(self, text, *, add_special_tokens):
        return [ord(c) for c in text]


def samples_of(render, messages):
    return chat_samples(TemplateChats(Template(render)), Chat(messages), "here")


def test_a_template_that_yields_no_assistant_tokens_is_refused():
    with pytest.raises(HyperDFlashConfigError, match="yields no tokens for answer 1"):
        samples_of(lambda messages, _: "".join(m["content"] for m in messages[:1]), CHAT[1:3])


def test_an_answer_ends_with_its_end_token_whatever_the_template_writes_then():
    """Found as: ChatML's newline, which no target writes, in the span."""

    def render(messages, prompt):
        return "".join(f"<{m['role']}>{m['content']}|\n" for m in messages) + "<assistant>" * prompt

    (sample,) = samples_of(render, CHAT[1:])
    answers = ["".join(map(chr, sample.tokens[a:b])) for a, b in sample.spans]
    assert answers == [f"{m['content']}|" for m in CHAT if m["role"] == "assistant"]


def test_a_template_that_renders_answers_differently_is_refused():
    def shouting(messages, prompt):
        text = "".join(m["content"] for m in messages)
        return text + "?" if prompt else text

    with pytest.raises(HyperDFlashConfigError, match="renders an answer differently"):
        samples_of(shouting, CHAT[1:3])


def test_a_turn_that_rewrites_earlier_ones_begins_another_sample():
    """Found as: a refusal, which asked to split such conversations by hand."""

    def forgetful(messages, prompt):
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        return "".join(m["content"] for m in messages[last:])

    found = samples_of(forgetful, CHAT)
    texts = ["".join(map(chr, s.tokens)) for s in found]
    assert texts == ["What is 2 + 2?It is 4.", "And 3 + 3?It is 6."]
    assert [s.spans for s in found] == [((14, 22),), ((10, 18),)]


def test_turns_that_continue_one_another_are_one_sample():
    turns = [([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 9], [7]), ([1, 9, 7], [8])]
    first, second = joined(turns)
    assert (first.tokens, first.spans) == ([1, 2, 3, 4, 5, 6], ((2, 3), (4, 6)))
    assert (second.tokens, second.spans) == ([1, 9, 7, 8], ((2, 3), (3, 4)))


def test_what_v4_drops_of_a_conversation_decides_its_samples(target_dir, tmp_path):
    """Reasoning is given up for the next turn, unless there are tools: then all is one sequence."""
    v4 = load_chats(str(published_v4(tmp_path, target_dir)))
    messages = [dict(m) for m in CHAT]
    messages[2]["reasoning_content"], messages[4]["reasoning_content"] = "Two twos.", "Threes."
    tool = {"type": "function", "function": {"name": "add"}}

    def read(**fields) -> list[list[str]]:
        line = {"messages": messages, **fields}
        found = line_samples(v4, line, "here")
        return [[v4.tokenizer.decode(s.tokens[a:b]) for a, b in s.spans] for s in found]

    end = v4.tokenizer.eos_token
    first, second = f"Two twos.</think>It is 4.{end}", f"Threes.</think>It is 6.{end}"
    assert read() == [[first], [second]]
    assert read(tools=[tool]) == read(tools=json.dumps([tool])) == [[first, second]]
    off = {"thinking": False}
    assert read(chat_template_kwargs=off) == [[f"It is 4.{end}", f"It is 6.{end}"]]


def test_a_sample_that_is_too_long_keeps_its_first_answers(chats, tmp_path):
    """Found as: a conversation of many turns would be lost for its last one."""
    long = {"role": "assistant", "content": "1 " * 99}
    path = write(tmp_path / "data.jsonl", {"messages": [*CHAT, CHAT[1], long]})
    loaded = load_samples([path], chats, max_length=100)
    assert loaded.samples == chat_samples(chats, Chat(CHAT), "here")
    assert not loaded.too_long
