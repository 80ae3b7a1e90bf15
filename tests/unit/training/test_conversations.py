"""Chat data to samples: every accepted form, the assistant mask, and bad data's messages."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import AutoTokenizer

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.training.conversations import (
    load_samples,
    parse_conversation,
    read_conversations,
    to_sample,
)

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6."},
]


@pytest.fixture(scope="module")
def tokenizer(target_dir):
    return AutoTokenizer.from_pretrained(target_dir)


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
    assert parse_conversation(record, "here") == CHAT[1:3]


def test_a_hub_data_set_is_streamed(monkeypatch, tokenizer):
    import datasets

    asked = []

    def load_dataset(name, *, split, streaming):
        asked.append((name, split, streaming))
        if name == "owner/gone":
            raise ConnectionError("offline")
        return iter([{"conversations": CHAT, "id": 3}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_conversations("hub:owner/name")) == [(CHAT, "hub:owner/name, row 1")]
    assert len(load_samples(["hub:owner/name:test"], tokenizer, 512).samples) == 1
    assert asked == [("owner/name", "train", True), ("owner/name", "test", True)]
    with pytest.raises(FileNotFoundError, match="owner/gone cannot be read from the hub: offline"):
        list(read_conversations("hub:owner/gone"))


def test_turns_are_prompts_without_answers(tokenizer):
    messages = parse_conversation({"turns": ["one", "two"]}, "here")
    assert [m["role"] for m in messages] == ["user", "user"]
    assert to_sample(tokenizer, messages) is None


def test_the_spans_are_the_answers_and_their_end_tokens(tokenizer):
    sample = to_sample(tokenizer, CHAT)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(sample.tokens) == whole
    answers = [tokenizer.decode(sample.tokens[a:b]) for a, b in sample.spans]
    end = tokenizer.eos_token
    assert answers == [f"It is 4.{end}", f"It is 6.{end}"]
    assert sample.answer_tokens == sum(b - a for a, b in sample.spans)


def test_what_follows_the_last_answer_is_left_out(tokenizer):
    trailing = [*CHAT, {"role": "user", "content": "Thanks"}]
    assert to_sample(tokenizer, trailing) == to_sample(tokenizer, CHAT)


def test_long_and_unanswered_conversations_are_counted(tokenizer, tmp_path):
    path = write(
        tmp_path / "data.jsonl",
        {"messages": CHAT},
        {"turns": ["hello"]},
        {"instruction": "Count", "output": "1 " * 500},
    )
    loaded = load_samples([path], tokenizer, max_length=100)
    assert (len(loaded.samples), len(loaded.places)) == (1, 1)
    assert (len(loaded.without_answer), len(loaded.too_long)) == (1, 1)
    assert all(str(path) in where for where in (*loaded.without_answer, *loaded.too_long))
    assert "left out 1 over the length limit and 1 without an answer" in str(loaded)
    with pytest.raises(HyperDFlashConfigError, match=r"no samples in .* raise max_length \(5\)"):
        load_samples([path], tokenizer, max_length=5)


def test_regenerated_lines_keep_their_exact_tokens(tokenizer, tmp_path):
    first = {"tokens": [5, 6, 7, 8], "spans": [[2, 4]]}
    second = {"tokens": [5, 6, 7, 8, 9, 10], "spans": [[5, 6]]}
    path = write(tmp_path / "data.jsonl", {"messages": CHAT, "samples": [first, second]})
    loaded = load_samples([path], tokenizer, max_length=5)
    assert [(s.tokens, s.spans) for s in loaded.samples] == [([5, 6, 7, 8], ((2, 4),))]
    assert (len(loaded.without_answer), len(loaded.too_long)) == (0, 1)
    for bad in (
        {"tokens": [1]},
        {"tokens": ["x"], "spans": []},
        {"tokens": [1], "spans": [[0, 2]]},
    ):
        path = write(tmp_path / "bad.jsonl", {"samples": [bad]})
        with pytest.raises(HyperDFlashConfigError, match=r"bad.jsonl:1: (samples must hold|spans)"):
            load_samples([path], tokenizer, max_length=5)


def test_samples_that_are_no_list_are_named(tokenizer, tmp_path):
    path = write(tmp_path / "data.jsonl", {"samples": 5})
    message = r"data.jsonl:1: samples must be a non-empty list, found 5\. Fix or remove this line"
    with pytest.raises(HyperDFlashConfigError, match=message):
        load_samples([path], tokenizer, max_length=5)


def test_a_template_that_is_missing_or_refuses_is_one_line(tokenizer, tmp_path):
    """Found as: transformers' and jinja's tracebacks."""
    path = write(tmp_path / "data.jsonl", {"instruction": "a", "output": "b"})
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    message = r"data.jsonl:1: the target's chat template refuses .*: roles must alternate\. Fix"
    with pytest.raises(HyperDFlashConfigError, match=message):
        load_samples([path], other, max_length=5)
    other.chat_template = None
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
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role 'tool' is not one of"),
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

    def __init__(self, render):
        self.render = render

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        return self.render(messages, add_generation_prompt)

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}


def test_a_template_that_yields_no_assistant_tokens_is_refused():
    mute = Template(lambda messages, prompt: "".join(m["content"] for m in messages[:1]))
    with pytest.raises(HyperDFlashConfigError, match="yields no tokens for answer 1"):
        to_sample(mute, CHAT[1:3])


def test_a_template_that_rewrites_is_refused():
    def shouting(messages, prompt):
        text = "".join(m["content"] for m in messages)
        return text + "?" if prompt else text

    with pytest.raises(HyperDFlashConfigError, match="renders an answer differently"):
        to_sample(Template(shouting), CHAT[1:3])

    def forgetful(messages, prompt):
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        return "".join(m["content"] for m in messages[last:])

    with pytest.raises(HyperDFlashConfigError, match="rewrites earlier turns"):
        to_sample(Template(forgetful), CHAT)
