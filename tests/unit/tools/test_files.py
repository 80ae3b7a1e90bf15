"""Files that are whole or not there, JSON lines that survive a kill, folders with one owner."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest

from sglang_hyperdflash.tools import atomic, jsonl, ownership
from sglang_hyperdflash.tools.atomic import WriteFailed, replacing, write_json, write_text
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashError
from sglang_hyperdflash.tools.jsonl import ResumableWriter, read_lines
from sglang_hyperdflash.tools.ownership import InUse, NotOurs, claim, lock


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


# --- atomic


def test_a_file_is_replaced_whole_with_the_umask_s_mode(tmp_path):
    path = tmp_path / "new" / "a.json"
    before = os.umask(0o027)
    try:
        write_json(path, {"a": 1})
        with replacing(tmp_path / "b") as partial:
            partial.unlink()
            partial.write_text("x")
            partial.chmod(0o600)  # what a library may do
    finally:
        os.umask(before)
    assert json.loads(path.read_text()) == {"a": 1}
    for file in (path, tmp_path / "b"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a.json", "b"]


def test_a_full_disk_leaves_the_old_content_and_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_text(path, "old")
    monkeypatch.setattr(atomic.os, "fsync", no_space)
    with pytest.raises(WriteFailed, match=r"cannot write .*/a: No space left.*is as it was"):
        write_text(path, "new")
    with pytest.raises(WriteFailed) as found:
        write_text(tmp_path / "b", "new")
    assert "as it was" not in str(found.value) and "\n" not in str(found.value)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_error_of_the_writer_itself_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(KeyError), replacing(tmp_path / "a"):
        raise KeyError("bug")
    with pytest.raises(WriteFailed), replacing(tmp_path / "a", (RuntimeError,)):
        raise RuntimeError("stream writer failed")
    assert not list(tmp_path.iterdir())


# --- checksum


def test_a_hash_of_json_does_not_depend_on_the_order_of_keys():
    assert short_hash({"a": 1, "b": (2,)}) == short_hash({"b": [2], "a": 1})
    assert short_hash({"a": 1}) != short_hash({"a": 2})


# --- jsonl


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", r'f:3: expected a JSON object, found "\{" \(.* column \d.*\)\. Fix or remove'),
        (b"[1]", r"f:3: expected a JSON object, found \[1\]"),
        (b'{"a": "\xff"}', r"f:3: expected a JSON object, .* byte 0xff in position 7"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(tmp_path, line, message):
    path = tmp_path / "f"
    path.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    lines = read_lines(path)
    assert next(lines) == (f"{path}:1", {"a": 1})
    with pytest.raises(BadRow, match=message):
        next(lines)
    with pytest.raises(FileNotFoundError):
        next(read_lines(tmp_path / "missing"))


def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path):
    path = tmp_path / "f"
    with ResumableWriter(path, print) as writer:
        writer.append({"i": 0, "text": "zwölf"})
        writer.append({"i": 1, "text": "\ud800"})
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        seen = []
        with ResumableWriter(path, seen.append) as writer:
            kept = len(seen)
            assert kept == whole[:cut].count(b"\n")
            for i, text in enumerate(("zwölf", "\ud800")):
                if i >= kept:
                    writer.append({"i": i, "text": text})
        assert path.read_bytes() == whole


def test_a_damaged_line_inside_a_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b'{"i": 0}\n\n{"i"\n{"i": 2}\n')
    with pytest.raises(BadRow, match=r"f:3: .*Fix or remove it"):
        ResumableWriter(path, print)
    path.write_bytes(path.read_bytes().replace(b'{"i"\n', b""))
    seen = []
    with ResumableWriter(path, seen.append) as writer:
        assert seen == [{"i": 0}, {"i": 2}] and writer.torn is None


def test_a_full_disk_in_the_middle_of_a_line_takes_the_line_back(tmp_path, monkeypatch):
    path = tmp_path / "f"
    writer = ResumableWriter(path, print)
    writer.append({"i": 0})
    write = os.write

    def half(handle, data):
        if len(data) > 5:
            return write(handle, data[:5])
        return no_space()

    monkeypatch.setattr(jsonl.os, "write", half)
    with pytest.raises(WriteFailed, match="No space left"):
        writer.append({"i": 1})
    monkeypatch.undo()
    writer.append({"i": 2})
    writer.close()
    assert [value["i"] for _, value in read_lines(path)] == [0, 2]


# --- ownership


def refused(path, kind="train", settings=None, **more) -> str:
    """The one line with which a place is refused."""
    with pytest.raises(NotOurs) as found, claim(path, kind, settings or {}, **more):
        pass
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_run_resumes_by_the_same_settings(tmp_path):
    folder = tmp_path / "a" / "b"
    with claim(folder, "eval run", {"n": (1, 2)}) as first:
        (folder / "result").write_text("x")
    with claim(folder, "eval run", {"n": [1, 2]}) as second:
        assert second == first
    manifest = json.loads((folder / ".hyperdflash.json").read_text())
    assert manifest == {"kind": "eval run", "run_id": first, "settings": {"n": [1, 2]}}
    assert sorted(p.name for p in folder.iterdir()) == [".hyperdflash.json", "result"]


def test_a_folder_that_is_not_ours_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "expected a new or empty folder" in refused(tmp_path)
    assert "found config.json" in refused(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert "found config.json" in refused(tmp_path / "config.json")
    (tmp_path / ".hyperdflash.json").write_text('{"kind": "train"')
    assert "found config.json" in refused(tmp_path)


def test_another_command_and_other_settings_are_refused_by_name(tmp_path):
    with claim(tmp_path, "train", {"lr": 1e-3, "steps": 5, "data": {"path": "a"}}):
        (tmp_path / "result").write_text("x")
    said = refused(tmp_path, "train", {"lr": 1e-3, "steps": 5, "data": {"path": "b"}})
    assert 'other settings: data.path was "a", now "b". Nothing' in said
    said = refused(tmp_path, "train", {"lr": "high", "new": 1})
    assert 'lr was 0.001, now "high"; new was unset, now 1; steps was 5, now unset and 1' in said
    said = refused(tmp_path, "capture")
    assert "output of `capture`" in said and "found that of `train`" in said


def test_a_run_that_begins_while_another_looks_is_no_other_content(tmp_path, monkeypatch):
    """Found by reading: two shares of a capture that were started together; the second saw the
    first one's files, but not yet its manifest.
    """
    looks = [ownership._contents, ownership._manifest]

    def look(number: int):
        def looked(path, is_file):
            found = looks[number](path, is_file)
            if not (tmp_path / ownership.MANIFEST).exists():
                content = {"kind": "a command", "run_id": "one", "settings": {}}
                (tmp_path / ownership.MANIFEST).write_text(json.dumps(content))
                (tmp_path / "manifests").mkdir()
            return found

        return looked

    monkeypatch.setattr(ownership, "_contents", look(0))
    monkeypatch.setattr(ownership, "_manifest", look(1))
    with claim(tmp_path, "a command", {}) as run_id:
        assert run_id == "one"


def test_a_file_is_claimed_like_a_folder(tmp_path):
    file = tmp_path / "out.jsonl"
    with claim(file, "regenerate", {"t": 1}, is_file=True) as first:
        file.write_text("x")
        with (
            pytest.raises(InUse, match=f"process {os.getpid()} on "),
            claim(file, "regenerate", {"t": 1}, is_file=True),
        ):
            pass
        with claim(tmp_path / "other.jsonl", "regenerate", {"t": 1}, is_file=True):
            pass
    with claim(file, "regenerate", {"t": 1}, is_file=True) as again:
        assert again == first
    foreign = tmp_path / "mine.txt"
    foreign.write_text("letters")
    assert "expected no file" in refused(foreign, "regenerate", {"t": 1}, is_file=True)
    assert foreign.read_text() == "letters"


@pytest.mark.parametrize("manifest", ["other settings", "another command", "damaged"])
def test_a_manifest_whose_content_was_removed_does_not_block_a_new_run(tmp_path, manifest):
    """Found as: a removed output stayed refused for settings that nothing visible held."""
    kind = "capture" if manifest == "another command" else "train"
    file, folder = tmp_path / "out.jsonl", tmp_path / "work"
    with claim(file, kind, {"t": 1}, is_file=True) as first, claim(folder, kind, {"t": 1}):
        file.write_text("x")
        (folder / "result").write_text("x")
    refused(file, "train", {"t": 2}, is_file=True)
    refused(folder, "train", {"t": 2})
    if manifest == "damaged":
        (tmp_path / ".out.jsonl.hyperdflash.json").write_text("{")
        (folder / ".hyperdflash.json").write_text("{")
    file.unlink()
    (folder / "result").unlink()
    with (
        claim(file, "train", {"t": 2}, is_file=True) as found,
        claim(folder, "train", {"t": 2}),
    ):
        assert found != first
        file.write_text("")  # what a run leaves that is killed before its first line
    with claim(file, "train", {"t": 2}, is_file=True) as again:
        assert again == found


def test_a_folder_of_data_is_locked_without_a_manifest(tmp_path):
    (tmp_path / "mine").write_text("x")
    with lock(tmp_path, "fetch"), pytest.raises(InUse), lock(tmp_path, "fetch"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with claim(tmp_path / "work", "train", {}), pytest.raises(NotOurs, match="of `train`"):
        lock(tmp_path / "work", "fetch").__enter__()


HOLDER = """
import os, sys, time
from pathlib import Path
from sglang_hyperdflash.tools.ownership import claim
with claim(Path(sys.argv[1]), "train", {}):
    forks = sys.argv[2] == "fork"
    in_child = forks and os.fork() == 0
    if in_child or not forks:
        print("held", flush=True)
    time.sleep(7200)
    if in_child:
        os._exit(0)
"""


def hold(folder, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(folder), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_second_run_is_refused_until_the_first_dies_however_it_dies(tmp_path, how):
    process = hold(tmp_path, how)
    try:
        with pytest.raises(InUse, match=rf"in use by process {process.pid} on "):
            claim(tmp_path, "train", {}).__enter__()
        first = json.loads((tmp_path / ".hyperdflash.json").read_text())["run_id"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with claim(tmp_path, "train", {}) as found:
            assert found == first
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_of_many_runs_that_start_together_one_gets_the_folder(tmp_path):
    source = textwrap.dedent("""
        import sys
        from pathlib import Path
        from sglang_hyperdflash.tools.errors import HyperDFlashError
        from sglang_hyperdflash.tools.ownership import claim
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            with claim(Path(sys.argv[1]), "train", {}):
                print("held", flush=True)
                sys.stdin.readline()
        except HyperDFlashError as error:
            print(type(error).__name__, flush=True)
    """)
    command = [sys.executable, "-c", source, str(tmp_path / "new")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    every = [subprocess.Popen(command, **pipes) for _ in range(5)]
    assert [process.stdout.readline() for process in every] == ["ready\n"] * 5
    for process in every:
        process.stdin.write("\n")
        process.stdin.flush()
    # Whoever holds the folder does so until all have said what they got.
    said = sorted(process.stdout.readline() for process in every)
    for process in every:
        process.communicate()
    assert said == ["InUse\n"] * 4 + ["held\n"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(HyperDFlashError, match="cannot write") as found:
        claim(tmp_path / "file" / "out", "train", {}).__enter__()
    assert "\n" not in str(found.value)
