"""Offline batches: input parsing and resuming, without an engine."""

from __future__ import annotations

import inspect
import json
import os
from itertools import islice

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture, generate
from sglang_hyperdflash.commands.answers import Prompts, hold_answers
from sglang_hyperdflash.commands.generate import KIND, parse_prompt
from sglang_hyperdflash.tools.acceptance import (
    accept_length,
    accept_length_of,
    add_histograms,
    position_acceptance,
)
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.training.rows import LeftOut


def prompts_of(tmp_path, *records, strict=False):
    source = tmp_path / "in.jsonl"
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    source.write_text("".join(line + "\n" for line in lines))
    return Prompts("prompts", [source], parse_prompt, None, strict)


USER = {"role": "user", "content": "Hi"}
# Earlier answers are part of a prompt.
UNSAID = [
    ({"role": "assistant", "content": None}, "must be text, found null"),
    ({"role": "assistant", "content": "<think>hm"}, "<think> tag"),
]


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ("{}", "exactly one of prompt, messages or turns, found only an empty object"),
        ('{"text": "a", "id": 3}', "found only text, id"),
        ('{"prompt": "a", "turns": ["b"]}', "found prompt and turns"),
        ('{"prompt": null, "turns": ["b"], "messages": []}', "found messages and turns"),
        ('{"prompt": ""}', 'prompt must be a non-empty string, found ""'),
        ('{"prompt": 3}', "a non-empty string, found 3"),
        ('{"prompt": "Hi \\ud83d"}', "lone surrogate"),
        ('{"turns": []}', "turns must be a non-empty list"),
        ('{"turns": [1]}', "must be text, found 1"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        *((json.dumps({"messages": [USER, said]}), reason) for said, reason in UNSAID),
    ],
)
def test_a_broken_line_is_left_out_and_the_others_keep_their_index(tmp_path, capsys, line, reason):
    """Found as: it ended the run; and a blank line before a prompt had it answered twice."""
    output, good = tmp_path / "out.jsonl", {"prompt": "a"}
    prompts = prompts_of(tmp_path, good, "", line, {"prompt": "b"})
    for answered in (0, 2):
        with held(output, prompts) as answers:
            assert (answers.count, answers.left) == (2, 2 - answered)
            for p in answers.waiting():
                answers.writer.append({"index": p.index, "digest": p.digest})
        assert [json.loads(entry)["index"] for entry in output.read_text().splitlines()] == [0, 3]
        (entry,) = map(json.loads, (tmp_path / "out.left_out.jsonl").read_text().splitlines())
        assert (entry["index"], entry["where"]) == (2, f"{tmp_path / 'in.jsonl'}:3")
        assert reason in entry["reason"] and reason in capsys.readouterr().out
    strict = prompts_of(tmp_path, good, "", line, strict=True)
    for name, refused in (("a", strict), ("b", prompts_of(tmp_path, line))):
        with (
            pytest.raises(HyperDFlashError, match=r"in.jsonl(:|, row )[13]: "),
            held(tmp_path / name, refused),
        ):
            pass


def test_an_input_that_changes_during_a_run_ends_it(tmp_path, capsys):
    """Found as: other rows than those that were counted were answered. The list is written too."""
    output, prompts = tmp_path / "out.jsonl", prompts_of(tmp_path, {"prompt": "a"}, "{")
    with (
        pytest.raises(HyperDFlashError, match=r"in.jsonl:1 has changed"),
        held(output, prompts) as answers,
    ):
        prompts_of(tmp_path, {"prompt": "new"}, {"prompt": "a"})
        list(answers.waiting())
    assert "1 left out" in capsys.readouterr().out
    assert (tmp_path / "out.left_out.jsonl").exists()


def test_the_three_kinds(tmp_path):
    message = {"role": "user", "content": "a"}
    records = {"prompt": "a"}, {"turns": ["a", "b"]}, {"messages": [message]}
    first, second, third = prompts_of(tmp_path, *records).read(LeftOut())
    assert first.text == "a"
    assert second.steps == [[message], [{"role": "user", "content": "b"}]]
    assert third.steps == [[message]]


def held(output, prompts, **settings):
    return hold_answers(output, KIND, settings, prompts)


def test_resume_drops_a_cut_line_and_keeps_the_rest(tmp_path, capsys):
    prompts = prompts_of(tmp_path, *({"prompt": f"p{i}"} for i in range(4)))
    output = tmp_path / "out.jsonl"
    with held(output, prompts) as answers:
        for p in islice(answers.waiting(), 3):
            answers.writer.append({"index": p.index, "digest": p.digest, "outputs": ["é\u2028"]})
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"index": 3, "dig')
    with held(output, prompts) as answers:
        assert sorted(answers.done) == [0, 1, 2]
    assert output.read_bytes() == whole
    assert "dropped line 4, cut by a kill" in capsys.readouterr().out


@pytest.mark.parametrize("found, damaged", [('"index"', '"inde8"'), ('"dig', '"dyg'), ("1", "2")])
def test_resume_refuses_a_record_that_is_no_longer_of_its_prompt(tmp_path, found, damaged):
    prompts = prompts_of(tmp_path, *({"prompt": f"p{i}"} for i in range(3)))
    output = tmp_path / "out.jsonl"
    with held(output, prompts) as answers:
        _, second, _ = answers.waiting()
        answers.writer.append({"index": 1, "digest": second.digest, "outputs": ["x"]})
    output.write_text(output.read_text().replace(found, damaged, 1))
    with pytest.raises(HyperDFlashConfigError, match="or is damaged"), held(output, prompts):
        pass


def test_resume_refuses_answers_to_another_input_and_other_settings(tmp_path):
    output, one = tmp_path / "out.jsonl", prompts_of(tmp_path, {"prompt": "a"})
    with held(output, one, temperature=0.0) as answers:
        (first,) = answers.waiting()
        answers.writer.append({"index": 0, "digest": first.digest, "outputs": []})
    other = prompts_of(tmp_path, {"prompt": "b"})
    with (
        pytest.raises(HyperDFlashConfigError, match="answers to another input"),
        held(output, other, temperature=0.0),
    ):
        pass
    with (
        pytest.raises(HyperDFlashError, match=r"other settings: temperature was 0.0, now 0.7"),
        held(output, other, temperature=0.7),
    ):
        pass


def test_a_file_of_another_is_never_appended_to(tmp_path, capsys, target_dir):
    source, output = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text('{"prompt": "a"}\n')
    output.write_text("mine\n")

    def refusal(output) -> str:
        files = ["--input", str(source), "--output", str(output)]
        assert main(["generate", "--model", str(target_dir), *files]) == 2
        return capsys.readouterr().err

    assert "expected no file, or the output of `hyperdflash generate`" in refusal(output)
    assert output.read_text() == "mine\n"
    assert "is the input" in refusal(source)
    assert "lies inside the target" in refusal(target_dir / "out.jsonl")


def test_a_second_run_into_one_output_is_refused(tmp_path, capsys, target_dir, monkeypatch):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    command = ["generate", "--model", str(target_dir), "--input", str(source)]
    command += ["--output", str(output)]

    def second(*_):
        assert main(command) == 2

    monkeypatch.setattr(generate, "_with_server", second)
    assert main(command) == 0
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err


def test_engine_arguments_that_shape_an_answer_are_settings(
    tmp_path, capsys, target_dir, monkeypatch
):
    """Found as: a re-run with another dtype or model went on with the same file."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    command = ["generate", "--model", str(target_dir), "--input", str(source)]
    command += ["--output", str(output)]

    def one(_arguments, _sampling, _args, answers, _chats):
        first = next(answers.waiting())
        answers.writer.append({"index": 0, "digest": first.digest, "outputs": ["x"]})

    monkeypatch.setattr(generate, "_with_server", one)

    def run(**engine) -> tuple[int, str]:
        options = ["--engine-args", json.dumps(engine)] if engine else []
        return main([*command, *options]), capsys.readouterr().err

    assert run(random_seed=3, max_total_tokens=64) == (0, "")
    assert run(random_seed=3, mem_fraction_static=0.2) == (0, "")
    for other, message in (
        ({"random_seed": 4}, "engine_args.random_seed was 3, now 4"),
        ({"random_seed": 3, "revision": "b"}, 'engine_args.revision was unset, now "b"'),
        ({}, "engine_args.random_seed was 3, now unset"),
    ):
        code, said = run(**other)
        assert code == 2 and message in said
    for name, instead in generate.OWN.items():
        code, said = run(**{name: "other"})
        assert code == 2 and f"found {name}. {instead}" in said
    assert main([*command, "--dtype", "half", "--engine-args", '{"random_seed": 3}']) == 2
    assert 'dtype was "auto", now "half"' in capsys.readouterr().err


def test_names_of_engine_arguments_are_the_engine_s():
    known = set(inspect.signature(ServerArgs).parameters)
    assert known >= generate.MEMORY_ONLY | capture.CAPTURE_OWN.keys()
    assert capture.CAPTURE_OWN.keys() >= generate.OWN.keys()


def test_metrics_follow_their_definitions():
    histogram = add_histograms([[1, 2], [0, 1, 4], []])
    assert histogram == [1, 3, 4]
    assert accept_length(11, 8) == 1 + 11 / 8
    assert accept_length(0, 0) is None and accept_length_of([]) is None
    assert position_acceptance(histogram, 3) == [7 / 8, 4 / 8, 0.0]
