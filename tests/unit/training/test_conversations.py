"""Chat data to samples: every accepted form, the assistant mask, and what becomes of bad rows."""

import copy
import gzip
import json
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.targets.chats import TemplateChats, load_chats
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.training.conversations import line_samples, load_samples
from sglang_hyperdflash.training.rows import LeftOut, read_rows
from sglang_hyperdflash.training.store.manifest import content_hash
from tests.conftest import EXAMPLE
from tests.unit.commands.builders import dialogue, write_rows
from tests.unit.targets.published_v4 import published_v4

CHAT = dialogue("Be short.", "What is 2 + 2?", "It is 4.", "And 3 + 3?", "It is 6.")
USER = {"role": "user", "content": "Hi"}
# What DeepSeek-V4 is served of a row that it can use.
PLAIN, THOUGHT = "<U>Hi<A></think>Yo<E>", "<U>Hi<A><think>hm</think>Yo<E>"
SYSTEM = f"Be brief.{PLAIN}"
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def chats(target_dir):
    return load_chats(str(target_dir))


@pytest.fixture(scope="module")
def v4(target_dir, tmp_path_factory):
    return load_chats(str(published_v4(tmp_path_factory.mktemp("v4"), target_dir)))


def said(*contents, **fields):
    """A row of a user's greeting and what the assistant says to it."""
    answers = [{"role": "assistant", "content": content, **fields} for content in contents]
    return {"messages": [USER, *answers]}


def turn(role, value="x"):
    return {"conversations": [{"from": "human", "value": "Hi"}, {"from": role, "value": value}]}


def parts(*contents):
    return [{"type": "text", "text": content} for content in contents]


# A row, or its line, and the samples that it gives, or a part of the reason why it is left out.
ROWS = [
    (said("Yo"), [PLAIN]),
    (turn("gpt", "Yo"), [PLAIN]),
    ({"messages": [*said("Yo")["messages"], USER]}, [PLAIN]),
    ({"conversation": said("Yo")["messages"], "language": "English"}, [PLAIN]),
    ({"instruction": "Hi", "output": "Yo"}, [PLAIN]),
    ({"instruction": "Hi", "input": "you", "output": "Yo"}, [PLAIN.replace("Hi", "Hi\nyou")]),
    ({"question": "Hi", "answer": "Yo", "messages": None}, [PLAIN]),
    ({"system": "Be brief.", **said("Yo")}, [SYSTEM]),
    ({"system_prompt": "Be brief.", "question": "Hi", "response": "Yo"}, [SYSTEM]),
    ({"system": "", **said("Yo")}, [PLAIN]),
    ({"system": "S", "messages": [{"role": "system", "content": "T"}, USER]}, "system column"),
    ({"system": 5, **said("Yo")}, "must be text, found 5"),
    (said(parts("Yo")), [PLAIN]),
    (said(parts("Y", "o")), [PLAIN.replace("Yo", "Y\n\no")]),
    (said([*parts("Yo"), {"type": "image_url", "image_url": {"url": "x"}}]), "must be text"),
    (said("<think>\nhm\n</think>\n\nYo"), [THOUGHT]),
    (said("<think>\n\n</think>\n\nYo"), [PLAIN]),
    (said("Yo", reasoning_content="hm"), [THOUGHT]),
    (said("Yo", thinking="hm"), [THOUGHT]),
    (said("Yo", thinking=True), "reasoning must be text"),
    (said("<think>hm"), "<think> tag"),
    (said("<think>a</think>Yo", reasoning="hm"), "<think> tag"),
    ({**said("Yo"), **THINKING}, ["<U>Hi<A><think></think>Yo<E>"]),
    ({**said("Yo", reasoning="hm"), "chat_template_kwargs": {"enable_thinking": False}}, [PLAIN]),
    ({**said("Yo"), "chat_template_kwargs": {"effort": 1}}, "found effort"),
    ({**said("Yo"), "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    ({"messages": [{"role": "assistant", "content": "Hey"}, *said("Yo")["messages"]]}, [PLAIN]),
    ({"messages": [{"role": "assistant", "content": "Hey"}]}, "no turn of a user"),
    ({"turns": ["Hi"]}, "no answer"),
    ({"instruction": "Count", "output": "1 " * 900}, "after 500 tokens"),
    ({"messages": []}, "messages must be a non-empty list"),
    (turn("bing"), 'role "bing" is not one of'),
    (turn(["user"]), "is not one of"),
    (said(None), "must be text, found null"),
    (said(None, tool_calls={"a": 1}), "every tool call must have"),
    ({"messages": [{"role": "tool", "content": None}]}, "must be text, found null"),
    ({"messages": [{"role": "user"}]}, "must have role and content"),
    ({"turns": ["a"], "tools": {"name": "b"}}, "tools must be a list"),
    ({"instruction": None, "output": "x"}, "found output"),
    ({"samples": 5}, "samples must be a non-empty list"),
    ({"samples": None, **said("Yo")}, [PLAIN]),
    ({"messages": [USER, {"role": None, "from": "gpt", "value": "Yo"}]}, [PLAIN]),
    ({"turns": ["a"], "tools": "[" * 9_999}, "tools must be a list"),
    ({}, "found nothing"),
    (b'{"messages": [{"role": "user", "content": "Hi \\ud83d"}]}', "lone surrogate"),
    *((line, "expected a JSON object") for line in (b"{", b"[1]", b"[" * 99_999)),
    (b'{"prompt": "\xff", "response": "x"}', "expected a JSON object"),
    (b'{"turns": [' + b"9" * 5_000 + b"]}", "expected a JSON object"),
]


@pytest.mark.parametrize(("row", "outcome"), ROWS, ids=lambda value: str(value)[:70])
def test_a_row_is_used_as_it_is_served_or_left_out(v4, tmp_path, row, outcome):
    path, left_out = tmp_path / "data.jsonl", LeftOut()
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    path.write_bytes(json.dumps(said("Good")).encode() + b"\n" + line)
    first, *samples = load_samples([path], v4, 500, left_out).samples
    text = [v4.tokenizer.decode(sample.tokens) for sample in samples]
    for name, short in {"User": "U", "Assistant": "A", "end▁of▁sentence": "E"}.items():
        text = [t.replace(f"<｜{name}｜>", f"<{short}>") for t in text]
    text = [t.removeprefix("<｜begin▁of▁sentence｜>") for t in text]
    text = [t[t.find("\n\n<U>") + 2 if t.startswith("Reasoning Effort") else 0 :] for t in text]
    assert first.answer_tokens and left_out.read == 2
    left_out.report(listed := tmp_path / "left_out.jsonl")
    if isinstance(outcome, list):
        assert text == outcome and not listed.exists()
        return
    (entry,) = map(json.loads, listed.read_text().splitlines())
    assert not text and (entry["index"], entry["where"]) == (1, f"{path}:2")
    assert outcome in entry["reason"]
    with pytest.raises(HyperDFlashConfigError, match=r"data.jsonl:2: "):
        load_samples([path], v4, 500, LeftOut(strict=True))
    path.write_bytes(line)
    with pytest.raises(HyperDFlashConfigError, match=r"data.jsonl"):
        load_samples([path], v4, 500)


ONE, TWO = (json.dumps(said(text)).encode() for text in "12")
LINES, BOM = ONE + b"\n" + TWO, b"\xef\xbb\xbf"
# A null is a row that cannot be used.
ARRAY = json.dumps([said("1"), said("2"), None], indent=1).encode()
ROWS_OF_ARRAY, ROWS_OF_LINES = [", row 1", ", row 2"], [":1", ":2"]
FOLDER = {"b.json": b"[%s, null]" % TWO, "a.jsonl": ONE}
FOLDER |= {"README.md": b"{", ".c.json": b"{", "d.left_out.jsonl": b"{}"}


@pytest.mark.parametrize(
    ("files", "places"),
    [
        ({"a.jsonl": b"\n" + ONE + b"\r\n\n" + TWO}, [":2", ":4"]),
        ({"a.txt": BOM + LINES}, ROWS_OF_LINES),
        ({"a.json": BOM + ARRAY}, ROWS_OF_ARRAY),
        ({"a.jsonl.gz": gzip.compress(LINES)}, ROWS_OF_LINES),
        ({"a": gzip.compress(ARRAY)}, ROWS_OF_ARRAY),
        (FOLDER, ["/a.jsonl:1", "/b.json, row 1"]),
    ],
    ids=["lines", "bom", "array", "gzip", "no-suffix", "folder"],
)
def test_a_source_is_read_whatever_it_is_packed_in(tmp_path, files, places):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    source = tmp_path / next(iter(files)) if len(files) == 1 else tmp_path
    left_out = LeftOut()
    read = left_out.usable(read_rows([source, source]), lambda *row: row)
    rows = [(where, record["messages"][1]["content"]) for _, record, where in read]
    assert left_out.read - len(rows) == 2 * any("row" in place for place in places)
    expected = [(f"{source}{place}", text) for place, text in zip(places, "12", strict=True)]
    assert rows == 2 * expected
    before = content_hash(source)
    path = tmp_path / min(files, key=lambda name: name.startswith((".", "R")))
    path.write_bytes(path.read_bytes() + b" ")
    assert content_hash(source) != before


def test_ids_past_the_vocabulary_leave_the_row_out(chats, monkeypatch):
    """A tokenizer may have more tokens than the target: they ended the training."""
    (sample,) = line_samples(chats, said("Yo"), "here")
    monkeypatch.setattr(chats, "vocab_size", max(sample.tokens) + 1)
    assert line_samples(chats, said("Yo"), "here") == [sample]
    monkeypatch.setattr(chats, "vocab_size", max(sample.tokens))
    with pytest.raises(BadRow, match=f"id {max(sample.tokens)}, past"):
        line_samples(chats, said("Yo"), "here")


def test_damaged_and_missing_sources_are_named(tmp_path, chats):
    packed = gzip.compress(LINES)
    (tmp_path / "a.gz").write_bytes(packed[:-9])
    (tmp_path / "crc.gz").write_bytes(packed[:-8] + bytes(8))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "folder").mkdir()
    for name, kind, message in (
        ("a.gz", HyperDFlashError, r"a.gz is damaged"),
        ("crc.gz", HyperDFlashError, r"crc.gz is damaged"),
        ("empty.jsonl", HyperDFlashConfigError, r"empty.jsonl"),
        ("none.jsonl", FileNotFoundError, r"none.jsonl"),
        ("folder", FileNotFoundError, r"folder"),
    ):
        with pytest.raises(kind, match=message):
            load_samples([tmp_path / name], chats, 9)


def test_a_hub_data_set_is_streamed_and_pinned(monkeypatch, chats):
    import datasets
    import huggingface_hub

    asked = []

    def load_dataset(name, subset, *, revision, split, streaming):
        asked.append((name, subset, revision, split, streaming))
        return {"owner/name": iter([{"conversations": CHAT}, {"conversations": []}])}[name]

    def dataset_info(_api, name, revision):
        return {"owner/name": SimpleNamespace(sha=f"{revision} is abc")}[name]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    for place in ("", "/main:test", "/main@v1.0:train", "@refs/a/b"):
        source, left_out = f"hub:owner/name{place}", LeftOut()
        assert load_samples([source], chats, 512, left_out).places == [f"{source}, row 1"]
        assert list(left_out.entries) == [f"{source}, row 2"]
    assert [row[1:] for row in asked] == [
        (None, None, "train", True),
        ("main", None, "test", True),
        ("main", "v1.0", "train", True),
        (None, "refs/a/b", "train", True),
    ]
    pinned = "hub:owner/name/main@v1 is abc:train"
    assert content_hash("hub:owner/name/main@v1") == pinned
    for call in (content_hash, lambda source: load_samples([source], chats, 512)):
        with pytest.raises(FileNotFoundError, match="hub:owner/gone"):
            call("hub:owner/gone")


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        *[([1], None), (["x"], []), ([1, 99_999], [[1, 2]]), ([-1, 2], [[1, 2]])],
        *[([1, 2, 3], [[1, 4]]), ([1, 2, 3, 4], [[1, 3], [2, 4]])],
    ],
)
def test_regenerated_tokens_of_another_target_end_the_run(chats, tmp_path, tokens, spans):
    """They would be an IndexError inside torch, or trained on twice."""
    sample = {"tokens": tokens} | ({} if spans is None else {"spans": spans})
    path = write_rows(tmp_path / "data.jsonl", said("Yo"), {"samples": [sample]})
    with pytest.raises(HyperDFlashConfigError, match=r"data.jsonl:2: "):
        load_samples([path], chats, max_length=512)


def test_regenerated_lines_keep_their_exact_tokens_and_first_answers(chats, tmp_path):
    first = {"tokens": [5, 6, 7, 8, 9, 10], "spans": [[2, 3], [3, 4], [4, 4], [4, 6]]}
    second = {"tokens": [5, 6, 7, 8, 9, 10], "spans": [[5, 6]]}
    path = write_rows(tmp_path / "data.jsonl", {"messages": CHAT, "samples": [first, second]})
    (sample,) = load_samples([path], chats, max_length=5).samples
    assert (sample.tokens, sample.spans) == ([5, 6, 7, 8], ((2, 3), (3, 4)))


TEMPLATE = (EXAMPLE / "target" / "chat_template.jinja").read_text()
THINKS = TEMPLATE.replace("message['content'] + eos", "message.reasoning_content + 'Yo' + eos")
ASKS = TEMPLATE + "{% if add_generation_prompt %}?{% endif %}"


def answered(chats, template, **fields) -> str:
    """A short answer as a target with this template writes it."""
    tokenizer = copy.deepcopy(chats.tokenizer)
    tokenizer.chat_template = template
    asked = {"role": "user", "content": "hm"}  # reasoning is looked for in the answer alone
    row = {"messages": [asked, {"role": "assistant", "content": "Yo", **fields}]}
    (sample,) = line_samples(TemplateChats(tokenizer), row, "here")
    ((start, end),) = sample.spans
    assert end == len(sample.tokens)
    return tokenizer.decode(sample.tokens[start:end])


def test_an_answer_ends_with_its_end_token_whatever_the_template_writes_then(chats):
    end = chats.tokenizer.eos_token
    template = TEMPLATE.replace("eos_token }}", "eos_token + '\\n' }}")
    assert template != TEMPLATE != THINKS
    assert answered(chats, template) == f"Yo{end}"
    assert answered(chats, THINKS, reasoning_content="hm") == f"hmYo{end}"


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (None, {}, "template"),
        ("{{ raise_exception('roles must alternate') }}", {}, "alternate"),
        ("{{ messages[0].content }}", {}, "answer 1"),
        (ASKS, {}, "renders an answer differently"),
        (TEMPLATE, {"reasoning_content": "hm"}, "drops the reasoning"),
    ],
    ids=["none", "refuses", "no-answer", "other-answer", "no-reasoning"],
)
def test_a_template_without_the_answer_is_refused(chats, template, fields, message):
    with pytest.raises(HyperDFlashConfigError, match=message):
        answered(chats, template, **fields)


def test_what_v4_drops_of_a_conversation_decides_its_samples(v4):
    """Reasoning is given up for the next turn, unless there are tools: then all is one sequence."""
    messages = [dict(m) for m in CHAT]
    messages[2]["reasoning_content"], messages[4]["reasoning_content"] = "Two twos.", "Threes."
    tool = {"type": "function", "function": {"name": "add"}}

    def read(**fields) -> list[list[str]]:
        line = {"messages": messages, **fields}
        samples = line_samples(v4, line, "here")
        return [[v4.tokenizer.decode(s.tokens[a:b]) for a, b in s.spans] for s in samples]

    end = v4.tokenizer.eos_token
    first, second = f"Two twos.</think>It is 4.{end}", f"Threes.</think>It is 6.{end}"
    assert read() == [[first], [second]]
    assert read(tools=[tool]) == read(tools=json.dumps([tool])) == [[first, second]]
    off = {"thinking": False}
    assert read(chat_template_kwargs=off) == [[f"It is 4.{end}", f"It is 6.{end}"]]
