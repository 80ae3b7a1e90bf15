"""Offline batches: input parsing and resuming, without an engine."""

from __future__ import annotations

import json

import pytest

from sglang_hyperdflash.commands.generate import parse_line, read_prompts, resume
from sglang_hyperdflash.tools.acceptance import accept_length, add_histograms, position_acceptance
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 4 is not JSON"),
        ("[1]", "exactly one of"),
        ("{}", "exactly one of"),
        ('{"prompt": "a", "turns": ["b"]}', "exactly one of"),
        ('{"prompt": ""}', "a non-empty string"),
        ('{"prompt": 3}', "a non-empty string"),
        ('{"turns": []}', "a non-empty list of strings"),
        ('{"turns": [1]}', "a non-empty list of strings"),
        ('{"messages": [{"role": "user"}]}', "role, content"),
    ],
)
def test_broken_lines_say_where_and_what(line, message):
    with pytest.raises(HyperDFlashConfigError, match=message):
        parse_line(3, line)


def test_the_three_kinds():
    assert parse_line(0, '{"prompt": "a"}').text == "a"
    assert parse_line(0, '{"turns": ["a", "b"]}').turns == ["a", "b"]
    message = {"role": "user", "content": "a"}
    assert parse_line(0, json.dumps({"messages": [message]})).messages == [message]


def test_missing_and_empty_inputs(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(HyperDFlashConfigError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.jsonl")


def test_resume_drops_a_cut_line_and_keeps_the_rest(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(3)))
    prompts = read_prompts(source)
    output = tmp_path / "out.jsonl"
    whole = "".join(
        json.dumps(
            {"index": p.index, "digest": p.digest, "outputs": ["é\u2028"]}, ensure_ascii=False
        )
        + "\n"
        for p in prompts[:2]
    )
    output.write_bytes(whole.encode() + b'{"index": 2, "dig')
    assert sorted(resume(output, prompts)) == [0, 1]
    assert output.read_text() == whole


def test_resume_refuses_answers_to_another_input(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text('{"index": 0, "digest": "other", "outputs": []}\n')
    with pytest.raises(HyperDFlashConfigError, match="answers to another input"):
        resume(output, read_prompts(source))


def test_metrics_follow_their_definitions():
    histogram = add_histograms([[1, 2], [0, 1, 4], []])
    assert histogram == [1, 3, 4]
    assert accept_length(11, 8) == 1 + 11 / 8
    assert accept_length(0, 0) == 0.0
    assert position_acceptance(histogram, 3) == [7 / 8, 4 / 8, 0.0]
