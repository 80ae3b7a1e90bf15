"""What SGLang refuses of an offline run is one line, not its traceback."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from jinja2 import TemplateError

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import generate, own_server
from sglang_hyperdflash.commands.pool import Pool, Refused
from sglang_hyperdflash.targets.chats import TemplateChats
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def test_an_option_that_no_server_has_is_named(target_dir):
    arguments = {"model_path": str(target_dir), "no_such_option": 1}
    with (
        pytest.raises(HyperDFlashConfigError, match=r"no-such-option.* --engine-args"),
        own_server.own_server(arguments, verbose=False),
    ):
        pass


class FakeServer:
    """Answers with the number of tokens that it was asked for; refuses prompts of ``refused``."""

    url = "http://fake"

    def __init__(self, limit: int, refused: int = -1) -> None:
        self.limit, self.refused = limit, refused
        self.asked: list[tuple[int, int]] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * len(text)

    def apply_chat_template(self, messages, **_how) -> str:
        return "".join(message["content"] for message in messages)

    async def ask(self, input_ids, sampling_params) -> dict:
        if len(input_ids) == self.refused:
            raise Refused("no such prompt")
        new = sampling_params["max_new_tokens"]
        self.asked.append((len(input_ids), new))
        meta = {"completion_tokens": new, "finish_reason": {"type": "length"}}
        return {"text": "x" * 3, "meta_info": meta}


@pytest.fixture
def run(tmp_path, monkeypatch, target_dir):
    """``hyperdflash generate`` with a :class:`FakeServer`; gives the exit code."""

    def generated(server, lines, *options: str) -> int:
        if server is not None:
            server.chat_template = "x"
            monkeypatch.setattr(generate, "load_chats", lambda _: TemplateChats(server))
        monkeypatch.setattr(generate, "own_server", lambda *_, **__: nullcontext(server))
        if server is not None:
            info = {"max_req_input_len": server.limit}
            monkeypatch.setattr(generate, "server_info", lambda _url: info)
            monkeypatch.setattr(Pool, "ask", lambda _pool, **asked: server.ask(**asked))
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["generate", "--model", str(target_dir), "--input", str(source)]
        return main([*command, "--output", str(tmp_path / "out.jsonl"), *options])

    return generated


def test_what_cannot_be_served_is_skipped_listed_and_counted(run, tmp_path, capsys):
    """Found as: one prompt that was too long ended the whole run, the same on every re-run."""
    server = FakeServer(limit=50, refused=7)
    lines = [{"prompt": "p" * n} for n in (5, 50, 7)] + [{"turns": ["t" * 20, "t" * 30]}]
    assert run(server, lines) == 0
    said = capsys.readouterr().out
    source, listed = tmp_path / "in.jsonl", tmp_path / "out.left_out.jsonl"
    assert f"1: {source}:2: the prompt has 50 tokens, the server accepts 49" in said
    assert f"1: {source}:3: no such prompt" in said
    assert f"{source}:4: turn 2: the prompt has 53 tokens" in said
    assert f"4 rows read, 1 kept, 3 left out, listed in {listed}" in said
    assert server.asked == [(5, 45), (20, 30)], "answers are cut to what the context leaves"
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {a["index"]: a["outputs"] for a in written} == {0: ["xxx"], 3: ["xxx"]}
    assert [a.get("refused", "")[:7] for a in written] == ["", "turn 2:"]
    longer = FakeServer(limit=90)
    assert run(longer, lines) == 0
    assert "2 already answered" in capsys.readouterr().out
    assert len(longer.asked) == 2
    # The conversation that has an answer keeps its end, and stays in the list.
    (left,) = map(json.loads, listed.read_text().splitlines())
    assert (left["index"], left["where"]) == (3, f"{source}:4")
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 4


def test_a_cut_answer_is_left_out_where_that_is_asked_for(run, tmp_path, capsys):
    lines = [{"prompt": "p"}, {"turns": ["one", "two"]}]
    for options, found in ([], ["xxx"] * 3), (["--finished-only"], [""] * 2):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        server = FakeServer(limit=50)
        assert run(server, lines, *options) == 0
        written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [text for one in written for text in one["outputs"]] == found
        assert [one["finish_reason"] for one in written] == ["length"] * 2
        count = len(server.asked)
        assert f"{count} of {count} answers are cut" in capsys.readouterr().out
        assert run(server, lines, *options) == 0 and len(server.asked) == count


def test_what_the_chat_template_refuses_is_skipped_and_listed(run, tmp_path, capsys, monkeypatch):
    """Found as: one such line ended the whole run."""

    def chat(messages, **_how) -> str:
        if messages[-1]["content"] == "no":
            raise TemplateError("roles must alternate")
        return "text"

    server = FakeServer(limit=50)
    monkeypatch.setattr(server, "apply_chat_template", chat)
    lines = [{"turns": ["no"]}, {"turns": ["yes", "no"]}, {"turns": ["yes"]}]
    assert run(server, lines) == 0
    reason = "the target's chat template refuses the conversation: roles must alternate"
    said = capsys.readouterr().out
    source = tmp_path / "in.jsonl"
    assert f"2: {source}:1: turn 1: {reason}\n" in said
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "--draft hub:a is neither a folder nor a hub id"),
        (b"[]", "expected a JSON object, found []"),
        (b"\xff\xfe", "config.json is not JSON"),
    ],
)
def test_a_draft_that_is_none_is_one_line(run, tmp_path, capsys, config, message):
    """Found as: tracebacks of transformers."""
    draft = "hub:a"
    if config is not None:
        draft = str(tmp_path)
        (tmp_path / "config.json").write_bytes(config)
    assert run(None, [{"prompt": "a"}], "--draft", draft) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--temperature", "-1", "a number of at least 0, found -1"),
        ("--temperature", "nan", "a number of at least 0, found nan"),
        ("--temperature", "inf", "a number of at least 0, found inf"),
        ("--top-p", "0", "above 0 and at most 1, found 0"),
        ("--top-k", "0", "-1 or at least 1, found 0"),
        ("--min-p", "1.5", "from 0 to 1, found 1.5"),
    ],
)
def test_sampling_that_no_target_takes_is_refused_once(
    run, tmp_path, capsys, option, value, expected
):
    """Found as: SGLang refused every prompt, after the model was loaded."""
    with pytest.raises(SystemExit, match="2"):
        run(None, [{"prompt": "a"}], option, value)
    error = capsys.readouterr().err
    assert f"{option}: must be {expected}" in error and error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_target_that_refuses_everything_is_an_error(run, capsys):
    assert run(FakeServer(limit=3), [{"prompt": "long"}]) == 2
    assert "no usable row of 1 in the prompts; " in capsys.readouterr().err


def test_the_list_of_a_run_without_an_answer_does_not_stop_the_corrected_one(run, tmp_path, capsys):
    """Found as: "it is not this run's list", of one that a run of other settings had left."""
    lines, listed = [{"prompt": "long"}, {"prompt": "p"}], tmp_path / "out.left_out.jsonl"
    assert run(FakeServer(limit=1), lines) == 2
    longer = FakeServer(limit=50)
    assert run(longer, lines, "--temperature", "0.5") == 0
    assert sorted(longer.asked) == [(1, 49), (4, 46)]
    assert not listed.exists()
    (tmp_path / "out.jsonl").unlink()
    listed.write_text('{"index": 0, "digest": "a", "where": "b", "note": "a user\'s own"}\n')
    assert run(None, lines) == 2
    assert str(listed) in capsys.readouterr().err
    assert listed.exists()


def test_a_target_without_a_chat_template_is_one_line_before_it_is_loaded(
    run, tmp_path, monkeypatch, capsys
):
    """Found as: a traceback, after the model was loaded."""
    plain = SimpleNamespace(chat_template=None, name_or_path="plain/target")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: plain)
    assert run(None, [{"turns": ["hello"]}]) == 2
    error = capsys.readouterr().err
    assert "the tokenizer of plain/target has no chat template" in error
    assert "Add a chat_template.jinja" in error and error.count("\n") == 1
