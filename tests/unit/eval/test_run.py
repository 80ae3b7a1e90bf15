"""``python -m eval run``: units and resume, one owner of a folder, nothing lost, identity."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import signal
import time
from threading import Event, Lock

import pytest

from eval import client
from eval.errors import EvalError
from eval.identity import Difference, first_difference, verdict
from eval.methods import DRAFT_OPTION, parse_urls, resolve
from eval.prompts import load
from eval.runner import read_sealed, write_sealed
from sglang_hyperdflash.tools import atomic
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.ownership import claim
from tests.conftest import ROOT
from tests.unit.eval.fake_server import in_a_process, rows_of, run_command, run_options
from tests.waiting import PATIENCE, until


def timeless(out) -> list[dict]:
    """Rows without what the clock says."""
    clock = ("tokens_per_s", "speedup", "speedup_range", "speedup_interval", "round_cost")
    rows = json.loads((out / "results.json").read_text())["rows"]
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def test_dspark_takes_the_draft_that_v4_flash_bundles():
    """Found as: --dspark-draft was demanded, and a sixth draft counted that is never made."""
    (_, bundled) = resolve(["baseline", "dspark"], {}, {})
    assert bundled.arguments == ("--speculative-algorithm", "DSPARK")
    config = ROOT / "examples" / "deepseek_v4_flash_config" / "dspark" / "config.json"
    assert bundled.num_drafts == json.loads(config.read_text())["dspark_block_size"]
    (_, named) = resolve(["baseline", "dspark"], {"dspark_draft": "owner/draft"}, {})
    assert named.arguments == (*bundled.arguments, DRAFT_OPTION, "owner/draft")


# --- a run and its rows


def test_a_run_becomes_rows_and_a_report(data, tmp_path, fake):
    target, ours = fake(4, []), fake(4, [1, 0, 0, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours, "--temperature", "0", "1") == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    row = next(r for r in rows if (r["method"], r["temperature"]) == ("hyperdflash6", 0))
    assert (row["tau"], row["num_prompts"], row["output_tokens"]) == (2.5, 3, 2 * 3 * 8)
    assert row["position_acceptance"] == [0.5, 0.5, 0.5, 0, 0, 0]
    assert row["identical_to_baseline"] is True and row["identical_answers"] == 6
    assert row["round_cost"] == pytest.approx(row["tau"] / row["speedup"])
    assert row["tau_interval"] == [2.5, 2.5]
    sampled = next(r for r in rows if (r["method"], r["temperature"]) == ("hyperdflash6", 1))
    assert sampled["identical_to_baseline"] is None
    assert {r["method"] for r in rows} == {"baseline", "baseline-again", "hyperdflash6"}
    # Every second turn saw the answer to the first.
    assert [m["role"] for m in ours.requests[1]["messages"]] == ["user", "assistant", "user"]
    text = (out / "report.md").read_text()
    assert "| HyperDFlash (6) | gsm8k | 0 | off | 1 | 2.50 (2.50 to 2.50) |" in text


def test_a_method_that_never_verified_has_no_tau(data, tmp_path, fake):
    target, ours = fake(4, []), fake(4, [])
    assert run_command(data, tmp_path / "out", target, ours) == 0
    assert rows_of(tmp_path / "out")["hyperdflash6"]["tau"] is None
    text = (tmp_path / "out" / "report.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| HyperDFlash (6)")]
    assert len(lines) >= 3 and not any(" 0.00 |" in line for line in lines)
    assert sum("not measured" in line for line in lines) >= 2


def test_empty_answers_are_counted(data, tmp_path, fake):
    target, ours = fake(4, []), fake(0, [])
    assert run_command(data, tmp_path / "out", target, ours) == 0
    row = rows_of(tmp_path / "out")["hyperdflash6"]
    assert row["empty_answers"] == 6 and row["identical_to_baseline"] is False


# --- resume


def test_a_finished_run_asks_nothing_again(data, tmp_path, fake):
    target, ours = fake(4, []), fake(4, [1, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    asked = len(ours.requests)
    assert run_command(data, out, target, ours) == 0
    assert len(ours.requests) == asked


def test_a_server_that_dies_costs_its_cells_only_and_they_are_tried_again(
    data, tmp_path, fake, capsys
):
    target, ours = fake(4, []), fake(4, [1, 1], die_after=8)
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 1
    rows = rows_of(out)
    assert "ConnectionError" in rows["hyperdflash6"]["error"]
    assert rows["hyperdflash6"]["rounds"] == 1 and rows["hyperdflash6"]["tau"] == 1.5
    assert "error" not in rows["baseline"] and "incomplete: hyperdflash6" in capsys.readouterr().out
    units = out / "units" / "gsm8k-t0-off-c1"
    assert "error" in json.loads((units / "hyperdflash6-r1.json").read_text())
    ours.die_after = None
    assert run_command(data, out, target, ours) == 0
    rows = rows_of(out)
    assert "error" not in rows["hyperdflash6"] and rows["hyperdflash6"]["rounds"] == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "older"])
def test_a_damaged_unit_is_noticed_and_measured_again(data, tmp_path, fake, damage):
    target, ours = fake(4, []), fake(4, [1, 0, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    expected = timeless(out)
    unit = out / "units" / "gsm8k-t0-off-c1" / "hyperdflash6-r1.json"
    content = unit.read_bytes()
    if damage == "flipped":  # still JSON, another number
        place = content.index(b'"correct_drafts": ') + len(b'"correct_drafts": ')
        content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        json.loads(content)
    elif damage == "older":  # without a checksum
        entry = json.loads(content)
        del entry["checksum"]
        content = json.dumps(entry).encode()
    else:
        content = content[: len(content) // 2 if damage == "cut" else 0]
    unit.write_bytes(content)
    asked = len(ours.requests)
    assert run_command(data, out, target, ours) == 0
    assert len(ours.requests) == asked + 6 and timeless(out) == expected


def test_a_damaged_description_of_the_run_is_written_again(data, tmp_path, fake):
    target, ours = fake(4, []), fake(4, [1, 0, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    expected = timeless(out)
    (out / "run.json").write_text('{"rounds": 1')
    assert run_command(data, out, target, ours) == 0 and timeless(out) == expected


# --- one owner, one run


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(data, tmp_path, fake, capsys):
    target, ours = fake(4, []), fake(4, [1])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert run_command(data, tmp_path / "out", target, ours) == 2
    error = capsys.readouterr().err
    assert "found config.json" in error and error.count("\n") == 1
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["config.json"]
    assert not ours.requests


@pytest.mark.parametrize(
    "more, words",
    [
        (("--num-prompts", "2"), "prompts of each benchmark.gsm8k was 3, now 2"),
        (("--rounds", "3"), "rounds was 2, now 3"),
        (("--max-new-tokens", "4"), "max_new_tokens was 5, now 4"),
        (("--temperature", "0", "1"), "cells was"),
    ],
)
def test_a_run_with_other_settings_is_refused_by_name(data, tmp_path, fake, capsys, more, words):
    target, ours = fake(4, []), fake(4, [1, 1])
    assert run_command(data, tmp_path / "out", target, ours) == 0
    asked = len(ours.requests)
    assert run_command(data, tmp_path / "out", target, ours, *more) == 2
    assert words in capsys.readouterr().err and len(ours.requests) == asked


def test_a_second_run_into_one_folder_is_refused_with_the_holder_s_name(
    data, tmp_path, fake, capsys
):
    target, ours = fake(4, []), fake(4, [1, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    settings = json.loads((out / ".hyperdflash.json").read_text())["settings"]
    with claim(out, "python -m eval run", settings):
        assert run_command(data, out, target, ours) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    assert run_command(data, out, target, ours) == 0


@pytest.fixture(scope="module")
def processes():
    """Processes that have ``eval`` loaded; this one's threads cannot be forked safely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.eval.fake_server"])
    return context


@pytest.mark.parametrize(
    "end, after",
    [
        *((signal.SIGKILL, after) for after in (1, 8, 15, 22, 35)),
        (signal.SIGINT, 9),
        (signal.SIGTERM, 9),
    ],
)
def test_a_stopped_run_resumes_to_the_results_of_an_undisturbed_one(
    data, tmp_path, fake, processes, end, after
):
    """Stopped after so many of its 36 requests: twice three turns of two, of three methods."""
    target, ours = fake(4, []), fake(4, [1, 0, 2])
    out, said, answered, released = tmp_path / "out", tmp_path / "said", itertools.count(1), Event()
    for server in (target, ours):  # the last one's answer does not come: nothing waits for it
        server.before = lambda: next(answered) < after or released.wait()
    command = run_options(data, out, target.url, ours.url)
    process = processes.Process(target=in_a_process, args=(command, said))
    process.start()
    until(lambda: len(ours.requests) + len(target.requests) == after or not process.is_alive())
    os.kill(process.pid, end)
    process.join(timeout=PATIENCE)
    released.set()
    assert process.exitcode == {2: 130, 9: -9, 15: 143}[end], said.read_text()
    if end == signal.SIGINT:
        last = said.read_text().splitlines()[-1]
        assert last.startswith("stopped: ")
    assert "Traceback" not in said.read_text()
    kept = sum(read_sealed(p) is not None for p in out.rglob("*-r*.json"))
    assert kept == (after - 1) // 6
    asked = len(ours.requests) + len(target.requests)
    assert run_command(data, out, target, ours) == 0
    assert len(ours.requests) + len(target.requests) == asked + 36 - 6 * kept
    assert run_command(data, tmp_path / "whole", target, ours) == 0
    assert timeless(out) == timeless(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    data, tmp_path, fake, capsys, monkeypatch
):
    target, ours = fake(4, []), fake(4, [1, 0, 2])
    out, flush, count = tmp_path / "out", os.fsync, 0

    def full(handle):
        nonlocal count
        count += 1
        if count > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return flush(handle)

    monkeypatch.setattr(atomic.os, "fsync", full)
    assert run_command(data, out, target, ours) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1
    monkeypatch.undo()
    assert run_command(data, out, target, ours) == 0
    assert not list(out.rglob("*.partial"))
    assert run_command(data, tmp_path / "whole", target, ours) == 0
    assert timeless(out) == timeless(tmp_path / "whole")


# --- identity


def test_first_differences_are_found_in_any_turn_and_at_ends():
    assert first_difference(0, [[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference(4, [[1, 2], [3, 4]], [[1, 2], [3, 5]]) == Difference(4, 1, 1, 4, 5)
    assert first_difference(0, [[1, 2]], [[1]]) == Difference(0, 0, 1, 2, None)
    assert verdict(0.1, 0.25) == "tie" and verdict(0.3, 0.25) == "fault"
    assert verdict(None, 0.25) == "not measured"


def parting(text: str) -> list[int]:
    """Departs from the baseline at the third token of a prompt's second turn and of another."""
    return [len(text), len(text), 90 if text == "qqqqq" else len(text), len(text)]


@pytest.mark.parametrize(
    "dtype, device, gap, ties, faults",
    [
        *[("bfloat16", "cpu", 0.2, 2, 0), ("bfloat16", "cuda", 0.5, 0, 2)],
        *[("float32", "cpu", 0.02, 0, 2), ("float32", "cuda", 0.02, 2, 0)],
        ("float32", "cuda", 0.2, 0, 2),
    ],
)
def test_a_first_difference_is_a_tie_or_a_fault_by_the_target_s_gap(
    data, tmp_path, fake, dtype, device, gap, ties, faults
):
    """On a GPU, attention multiplies fp32 as TF32: its rounding was found to be faults."""
    target = fake(4, [], logits={5: 20.0, 90: 20.0 - gap}, dtype=dtype, device=device)
    ours = fake(parting, [1, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    row = rows_of(out)["hyperdflash6"]
    assert (row["identical_answers"], row["compared_answers"]) == (4, 6)
    found = row["differences"][0]
    assert (found["prompt"], found["turn"], found["position"]) == (1, 0, 2)
    counted = "tf32" if (dtype, device) == ("float32", "cuda") else dtype
    assert (found["expected"], found["found"], found["dtype"]) == (5, 90, counted)
    assert found["gap"] == pytest.approx(gap)
    # The same difference in both rounds is one question, asked once, with the tokens before it.
    (asked,) = target.generated
    assert asked["input_ids"] == [5, 5, 5] and asked["token_ids_logprob"] == [5, 90]
    text = (out / "report.md").read_text()
    assert f"| HyperDFlash (6) | 6 | 4 | {ties} | {faults} | 0 | {gap:.4g} |" in text
    assert "noise floor) | 6 | 6 | 0 | 0 | 0 | - |" in text
    assert run_command(data, out, target, ours) == 0
    assert len(target.generated) == 1


def test_locked_servers_are_asked_with_the_key(data, tmp_path, fake, monkeypatch, capsys):
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "")
    target = fake(4, [], logits={5: 20.0, 90: 19.0}, key="secret")
    ours, out = fake(parting, [1, 1], key="secret"), tmp_path / "out"
    assert run_command(data, out, target, ours) == 1
    assert "401: Unauthorized" in rows_of(out)["hyperdflash6"]["error"]
    assert run_command(data, out, target, ours, "--api-key", "secret") == 0
    assert len(target.generated) == 1 and rows_of(out)["hyperdflash6"]["compared_answers"] == 6


def test_a_gap_that_cannot_be_measured_is_said_and_asked_again(data, tmp_path, fake, capsys):
    target, ours = fake(4, []), fake(parting, [1, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    assert "logit gaps of differing answers were not measured" in capsys.readouterr().out
    text = (out / "report.md").read_text()
    assert "| HyperDFlash (6) | 6 | 4 | 0 | 0 | 2 | - |" in text
    target.logits = {5: 1.0, 90: 1.0}
    assert run_command(data, out, target, ours) == 0
    assert "| HyperDFlash (6) | 6 | 4 | 2 | 0 | 0 | 0 |" in (out / "report.md").read_text()


# --- prompts, methods, client


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "expected a JSON object"),
        ('{"turns": "x"}', "expected .*turns.*found turns 'x'"),
        ('{"text": "x"}', r"found the fields \['text'\]"),
        ("[]", "expected a JSON object"),
    ],
)
def test_bad_benchmark_lines_are_named(tmp_path, line, message):
    (tmp_path / "b.jsonl").write_text('{"turns": ["ok"]}\n' + line + "\n")
    with pytest.raises(HyperDFlashError, match=rf"b\.jsonl:2: .*{message}"):
        load(tmp_path, ["b"], 10)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(HyperDFlashError, match="is empty"):
        load(tmp_path, ["b"], 10)


def test_prompts_are_drawn_from_the_whole_file(tmp_path):
    """Found as: of twelve families in turn, every sixth line was of two of them."""
    lines = [json.dumps({"turns": [str(i)]}) for i in range(48)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    found = [int(turn) for (turn,) in load(tmp_path, ["own"], 8)["own"]]
    assert found == [int(turn) for (turn,) in load(tmp_path, ["own"], 8)["own"]]
    assert sorted(set(found)) == found and len(found) == 8
    assert found[0] < 12 and found[-1] >= 36 and len({turn % 12 for turn in found}) > 4
    assert len(load(tmp_path, ["own"], 50)["own"]) == 48


def test_two_benchmarks_of_one_name_are_refused_by_both_paths(tmp_path):
    """Found as: the last file's prompts were asked alone, under the one name."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text(json.dumps({"turns": [folder]}) + "\n")
    paths = [str(tmp_path / folder / "test.jsonl") for folder in ("one", "two")]
    with pytest.raises(EvalError, match=rf"{paths[0]} and {paths[1]} .* called test"):
        load(tmp_path, paths, 10)
    assert load(tmp_path, paths[1:], 10) == {"test": [["two"]]}
    with pytest.raises(EvalError, match=rf"benchmarks test and {paths[1]}"):
        load(tmp_path / "one", ["test", paths[1]], 10)


def test_methods_become_server_arguments():
    drafts = {"mtp_draft": None, "hyperdflash_draft": "d"}
    methods = {m.name: m for m in resolve(["hyperdflash6", "mtp3", "baseline"], drafts, {})}
    assert list(methods) == ["baseline", "mtp3", "hyperdflash6"]
    assert methods["baseline"].arguments == ()
    text = " ".join(methods["mtp3"].arguments)
    assert "EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1" in text
    assert text.endswith("--speculative-num-draft-tokens 4")
    assert methods["hyperdflash6"].arguments[-1] == "d"
    assert parse_urls(["baseline=http://a:1/"]) == {"baseline": "http://a:1"}


def test_answers_come_in_order_with_no_more_in_flight_than_asked(fake):
    server, running, most, lock = fake(3, [1]), [], [], Lock()

    def before() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        until(lambda: len(server.requests) >= 4)
        time.sleep(0.2)  # for one too many to come
        with lock:
            running.pop()

    server.before = before
    turns = [["x" * (i + 1)] for i in range(9)]
    answers, _ = client.converse_all(server.url, turns, client.Sampling(0.0, 3), 4)
    assert [a.output_ids[0][0] for a in answers] == list(range(1, 10))
    assert max(most) == 4
    server.die_after = 12
    with pytest.raises(client.requests.RequestException):
        client.converse_all(server.url, turns, client.Sampling(0.0, 3), 2)
    assert len(server.requests) <= 9 + 3 + 2


def test_every_flipped_bit_of_a_unit_is_noticed(tmp_path):
    path, content = tmp_path / "unit.json", {"text": "answer", "ids": [1, 2, 3], "seconds": 0.25}
    write_sealed(path, content)
    whole = path.read_bytes()
    assert read_sealed(path) == content
    unnoticed = []
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            found = read_sealed(path)
            if found not in (None, content):  # white space between values may change
                unnoticed.append((place, bit))
    assert unnoticed == []
