"""``python -m eval run``: rows, resume, one owner of a folder, and nothing that is lost."""

import errno
import itertools
import json
import multiprocessing
import os
import signal
from threading import Event
from unittest.mock import Mock

import pytest

from eval.runner import read_sealed, write_sealed
from sglang_hyperdflash.tools import atomic
from sglang_hyperdflash.tools.ownership import claim
from tests.unit.eval.fake_server import in_a_process, rows_of, run_command, run_options
from tests.waiting import PATIENCE, until


def timeless(out) -> list[dict]:
    """Rows without what the clock says."""
    clock = ("tokens_per_s", "speedup", "speedup_range", "speedup_interval", "round_cost")
    rows = json.loads((out / "results.json").read_text())["rows"]
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def test_a_run_becomes_rows_and_a_report(data, tmp_path, fake):
    target, ours = fake(4, []), fake(4, [1, 0, 0, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours, "--temperature", "0", "1") == 0
    rows = {(r["method"], r["temperature"]): r for r in timeless(out)}
    assert {m for m, _ in rows} == {"baseline", "baseline-again", "hyperdflash6"}
    for name, compared in (("baseline", None), ("baseline-again", 6)):
        assert rows[name, 0]["tau"] == 1.0 and rows[name, 0].get("compared_answers") == compared
    row = rows["hyperdflash6", 0]
    assert (row["tau"], row["num_prompts"], row["output_tokens"]) == (2.5, 3, 2 * 3 * 8)
    assert row["position_acceptance"] == [0.5, 0.5, 0.5, 0, 0, 0]
    assert row["identical_to_baseline"] is True and row["identical_answers"] == 6
    assert row["tau_interval"] == [2.5, 2.5]
    assert rows["hyperdflash6", 1]["identical_to_baseline"] is None
    timed = rows_of(out)["hyperdflash6"]
    assert timed["round_cost"] == pytest.approx(timed["tau"] / timed["speedup"])
    # Every second turn saw the answer to the first.
    assert [m["role"] for m in ours.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert "2.50 (2.50 to 2.50)" in (out / "report.md").read_text()


def test_what_was_not_verified_or_not_written_has_no_number(data, tmp_path, fake):
    assert run_command(data, tmp_path / "plain", fake(4, []), fake(4, [])) == 0
    assert rows_of(tmp_path / "plain")["hyperdflash6"]["tau"] is None
    text = (tmp_path / "plain" / "report.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| HyperDFlash (6)")]
    assert len(lines) >= 3 and not any(" 0.00 |" in line for line in lines)
    assert run_command(data, tmp_path / "empty", fake(4, []), fake(0, [])) == 0
    row = rows_of(tmp_path / "empty")["hyperdflash6"]
    assert row["empty_answers"] == 6 and row["identical_to_baseline"] is False


def test_a_refused_prompt_is_in_the_report_and_the_key_is_sent(data, tmp_path, fake, monkeypatch):
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "")
    target, ours = (fake(4, drafts, key="secret") for drafts in ([], [1, 1]))
    ours.refuse = ("qqqqq", 400, b'{"message": "longer than the context"}')
    assert run_command(data, tmp_path / "locked", target, ours) == 1
    assert "401: Unauthorized" in rows_of(tmp_path / "locked")["hyperdflash6"]["error"]
    assert run_command(data, tmp_path / "out", target, ours, "--api-key", "secret") == 1
    rows = rows_of(tmp_path / "out")
    assert "error" not in rows["baseline"]
    error = rows["hyperdflash6"]["error"]
    assert "prompt 2" in error and "longer than the context" in error
    assert error[:80] in (tmp_path / "out" / "report.md").read_text()


def test_a_finished_run_asks_nothing_and_a_damaged_unit_is_measured_again(data, finished):
    out, target, ours = finished
    expected = timeless(out)
    unit = out / "units" / "gsm8k-t0-off-c1" / "hyperdflash6-r1.json"
    for path, content, asked_again in (unit, b"", 6), (out / "run.json", b'{"rounds": 1', 0):
        path.write_bytes(content)
        asked = len(ours.requests)
        assert run_command(data, out, target, ours) == 0
        assert len(ours.requests) == asked + asked_again and timeless(out) == expected


def test_every_damage_of_a_sealed_file_is_noticed(tmp_path):
    path, content = tmp_path / "unit.json", {"text": "answer", "ids": [1, 2], "seconds": 0.25}
    write_sealed(path, content)
    whole = path.read_bytes()
    assert read_sealed(path) == content
    unsealed = json.dumps({k: v for k, v in json.loads(whole).items() if k != "checksum"}).encode()
    for damaged in (unsealed, whole[: len(whole) // 2], b"", b"[]"):
        path.write_bytes(damaged)
        assert read_sealed(path) is None
    for place, bit in itertools.product(range(len(whole)), range(8)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(bytes(damaged))
        # White space between values may change.
        assert read_sealed(path) in (None, content), (place, bit)


def test_a_server_that_dies_costs_its_cells_only_and_they_are_tried_again(data, tmp_path, fake):
    target, ours, out = fake(4, []), fake(4, [1, 1], die_after=8), tmp_path / "out"
    assert run_command(data, out, target, ours) == 1
    rows = rows_of(out)
    assert "ConnectionError" in rows["hyperdflash6"]["error"]
    assert rows["hyperdflash6"]["rounds"] == 1 and rows["hyperdflash6"]["tau"] == 1.5
    assert "error" not in rows["baseline"]
    ours.die_after, asked = None, len(ours.requests) + len(target.requests)
    assert run_command(data, out, target, ours) == 0
    assert len(ours.requests) + len(target.requests) == asked + 6
    rows = rows_of(out)
    assert "error" not in rows["hyperdflash6"] and rows["hyperdflash6"]["rounds"] == 2


@pytest.mark.heavy
def test_a_run_that_is_stopped_again_and_again_ends_as_an_undisturbed_one(
    data, tmp_path, fake, finished
):
    """Its 36 requests are three turns of two, of three methods, twice."""
    # This process has threads, so it cannot be forked safely.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.unit.eval.fake_server"])
    target, ours = fake(4, []), fake(4, [1, 0, 2])
    out, log, whole = tmp_path / "out", tmp_path / "log", 0

    def asked() -> int:
        return len(ours.requests) + len(target.requests)

    ends = ((signal.SIGKILL, 1), (signal.SIGKILL, 15), (signal.SIGINT, 8), (signal.SIGTERM, 8))
    for end, after in ends:
        before, answered, released = asked(), itertools.count(1), Event()
        for server in (target, ours):  # the last one's answer does not come: nothing waits for it
            server.before = lambda n=answered, m=after, go=released: next(n) < m or go.wait()
        command = run_options(data, out, target, ours)
        process = processes.Process(target=in_a_process, args=(command, log), daemon=True)
        process.start()
        until(lambda n=before + after, p=process: asked() >= n or not p.is_alive())
        os.kill(process.pid, end)
        process.join(timeout=PATIENCE)
        released.set()
        code = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[end]
        assert process.exitcode == code and "Traceback" not in log.read_text(), log.read_text()
        whole += (after - 1) // 6
        assert sum(read_sealed(p) is not None for p in out.rglob("*-r*.json")) == whole
    before = asked()
    assert run_command(data, out, target, ours) == 0
    assert asked() == before + 36 - 6 * whole
    assert timeless(out) == timeless(finished.out)


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    data, tmp_path, finished, refused, monkeypatch
):
    out, full = tmp_path / "out", OSError(errno.ENOSPC, "No space left on device")
    flush = Mock(side_effect=itertools.chain([None] * 10, itertools.repeat(full)))
    monkeypatch.setattr(atomic.os, "fsync", flush)
    command = run_options(data, out, finished.target, finished.ours)
    assert "No space left on device" in refused(*command)
    monkeypatch.undo()
    assert run_command(data, out, finished.target, finished.ours) == 0
    assert not list(out.rglob("*.partial")) and timeless(out) == timeless(finished.out)


def test_a_folder_of_other_settings_of_something_else_or_in_use_is_refused(
    data, finished, refused, tmp_path
):
    other, command = tmp_path / "other", run_options(data, *finished)
    other.mkdir()
    (other / "config.json").write_text("{}")
    asked = len(finished.ours.requests)
    for more, name in (
        ("--num-prompts 2", "prompts of each benchmark.gsm8k"),
        ("--rounds 3", "rounds"),
        ("--max-new-tokens 4", "max_new_tokens"),
        ("--temperature 0 1", "cells"),
    ):
        assert f"{name} was " in refused(*command, *more.split())
    assert "config.json" in refused(*run_options(data, other, *finished[1:]))
    assert [path.name for path in other.iterdir()] == ["config.json"]
    settings = json.loads((finished.out / ".hyperdflash.json").read_text())["settings"]
    with claim(finished.out, "python -m eval run", settings):
        assert str(os.getpid()) in refused(*command)
    assert len(finished.ours.requests) == asked
