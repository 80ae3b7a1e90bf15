"""Offline batches: what is asked, left out and resumed, without an engine."""

import inspect
from contextlib import nullcontext

import pytest
from jinja2 import TemplateError
from sglang.srt.server_args import ServerArgs

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture, command_server, generate
from sglang_hyperdflash.commands.answers import Prompts, hold_answers
from sglang_hyperdflash.targets.chats import TemplateChats
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.unit.commands.builders import rows_of, write_rows

USER = {"role": "user", "content": "Hi"}
BROKEN = [
    *("{", "[1]", "{}", '{"prompt": "Hi \\ud83d"}', {"text": "a", "id": 3}, {"prompt": 3}),
    *({"prompt": "a", "turns": ["b"]}, {"prompt": None, "turns": ["b"], "messages": []}),
    *({"prompt": ""}, {"turns": []}, {"turns": [1]}, {"messages": [{"role": "user"}]}),
    # Earlier answers are part of a prompt.
    {"messages": [USER, {"role": "assistant", "content": None}]},
    {"messages": [USER, {"role": "assistant", "content": "<think>hm"}]},
]


class Tokenizer:
    """A token for each character; it knows no conversation that ends with "no"."""

    chat_template = "x"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * len(text)

    def apply_chat_template(self, messages, **_how) -> str:
        if messages[-1]["content"] == "no":
            raise TemplateError("roles must alternate")
        return "".join(message["content"] for message in messages)


@pytest.fixture
def run(server, tmp_path, monkeypatch, target_dir):
    """``hyperdflash generate`` with a server of so much context; gives the exit code."""
    monkeypatch.setattr(generate, "load_chats", lambda _: TemplateChats(Tokenizer()))
    monkeypatch.setattr(generate, "start_server", lambda *_, **__: nullcontext(server))

    def generated(lines, *options: str, context: int = 50) -> int:
        server.context = context
        server.prompts.clear()
        source = write_rows(tmp_path / "in.jsonl", *lines)
        command = ["generate", "--model", str(target_dir), "--input", str(source)]
        return main([*command, "--output", str(tmp_path / "out.jsonl"), *options])

    return generated


def asked(server) -> list[tuple[int, int]]:
    """Of every request, the tokens of its prompt and the most of its answer."""
    parameters = ((len(p["input_ids"]), p["sampling_params"]) for p in server.prompts)
    return [(length, sampling["max_new_tokens"]) for length, sampling in parameters]


def test_broken_lines_are_left_out_and_the_others_keep_their_index(run, server, tmp_path, capsys):
    """A blank line has an index, too."""
    lines, last = [{"prompt": "a"}, "", *BROKEN, {"prompt": "b"}], len(BROKEN) + 2
    for requests in (2, 0):
        assert run(lines) == 0 and len(server.prompts) == requests
        assert [row["index"] for row in rows_of(tmp_path / "out.jsonl")] == [0, last]
        listed = rows_of(tmp_path / "out.left_out.jsonl")
        assert [e["index"] for e in listed] == list(range(2, last))
        assert listed[0]["where"] == f"{tmp_path / 'in.jsonl'}:3"
    assert run(lines, "--strict") == 2 and "in.jsonl:3: " in capsys.readouterr().err


def test_an_input_that_changes_during_a_run_ends_it(tmp_path):
    """The list of what is left out is written, too."""
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a"}, "{")
    prompts = Prompts("prompts", [source], generate.parse_prompt, None, strict=False)
    held = hold_answers(tmp_path / "out.jsonl", generate.KIND, {}, prompts)
    with pytest.raises(HyperDFlashConfigError, match=r"in.jsonl:1"), held as answers:
        write_rows(source, {"prompt": "new"}, {"prompt": "a"})
        list(answers.waiting())
    assert (tmp_path / "out.left_out.jsonl").exists()


def test_answers_that_are_damaged_are_refused(run, tmp_path, capsys):
    lines, output = [{"prompt": "p" * n} for n in (1, 2, 3)], tmp_path / "out.jsonl"
    assert run(lines) == 0
    whole = output.read_bytes()
    for before, after in (b'"index"', b'"inde8"'), (b'"dig', b'"dyg'), (b'x": 1', b'x": 2'):
        output.write_bytes(whole.replace(before, after, 1))
        assert run(lines) == 2 and "out.jsonl" in capsys.readouterr().err


def test_what_cannot_be_served_is_skipped_listed_and_counted(run, server, tmp_path, capsys):
    """Too long, refused by the server, too long or refused by the chat template at turn 2."""
    server.refuses, listed = {7: 400}, tmp_path / "out.left_out.jsonl"
    lines = [{"prompt": "p" * n} for n in (5, 50, 7)] + [{"turns": ["t" * 20, "t" * 30]}]
    lines += [{"turns": ["no"]}, {"turns": ["yes", "no"]}]
    lines.append({"messages": [{"role": "user", "content": c} for c in "ab"]})
    assert run(lines, "--concurrency", "1") == 0
    said = capsys.readouterr().out
    assert "7 rows read, 2 kept, 5 left out" in said and f"{tmp_path / 'in.jsonl'}:2" in said
    # Answers are cut to what is left.
    assert asked(server) == [(5, 45), (7, 43), (20, 30), (3, 47), (2, 48)]
    assert [e["index"] for e in rows_of(listed)] == [1, 2, 3, 4, 5]
    written = rows_of(tmp_path / "out.jsonl")
    expected = {i: [f"answer {n}"] for i, n in {0: 5, 3: 20, 5: 3, 6: 2}.items()}
    assert {a["index"]: a["outputs"] for a in written} == expected
    assert [a.get("refused", "")[:6] for a in written] == ["", "turn 2", "turn 2", ""]
    server.refuses = {}
    assert run(lines, context=90) == 0 and len(server.prompts) == 2
    # The conversations that have an answer keep their end, and stay in the list.
    assert [e["index"] for e in rows_of(listed)] == [3, 4, 5]
    assert [a["index"] for a in rows_of(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 5, 6]


def test_a_cut_answer_is_left_out_where_that_is_asked_for(run, server, tmp_path):
    server.failures = [{"type": "length"}] * 2
    for requests in (2, 0):
        assert run([{"prompt": "p"}, {"turns": ["one", "two"]}], "--finished-only") == 0
        assert len(server.prompts) == requests
    written = rows_of(tmp_path / "out.jsonl")
    assert [(one["outputs"], one["finish_reason"]) for one in written] == [([""], "length")] * 2


def test_the_list_of_a_run_without_an_answer_does_not_stop_the_corrected_one(run, server, tmp_path):
    lines, listed = [{"prompt": "long"}, {"prompt": "p"}], tmp_path / "out.left_out.jsonl"
    assert run(lines, context=1) == 2 and len(rows_of(listed)) == 2
    assert run(lines, "--temperature", "0.5") == 0
    assert sorted(asked(server)) == [(1, 49), (4, 46)] and not listed.exists()


@pytest.mark.slow
def test_an_option_that_no_server_has_is_named(target_dir):
    arguments = {"model_path": str(target_dir), "no_such_option": 1}
    server = command_server.start_server(arguments, verbose=False)
    with pytest.raises(HyperDFlashConfigError, match="no-such-option"), server:
        pass


def test_names_of_engine_arguments_are_the_engine_s():
    known = set(inspect.signature(ServerArgs).parameters)
    assert known >= generate.MEMORY_ONLY | capture.RESERVED_ARGUMENTS.keys()
    assert capture.RESERVED_ARGUMENTS.keys() >= generate.RESERVED_ARGUMENTS.keys()
