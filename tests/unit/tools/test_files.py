"""Files that are whole or not there, JSON lines that survive a kill, places with one owner."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hyperdflash.tools import ownership
from sglang_hyperdflash.tools.atomic import WriteFailed, replacing, write_json, write_text
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import BadRow
from sglang_hyperdflash.tools.jsonl import ResumableWriter, read_lines
from sglang_hyperdflash.tools.ownership import InUse, NotOurs, claim, lock

SETTINGS = settings(
    deadline=None, derandomize=True, database=None, max_examples=40, stateful_step_count=20
)
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_replaced_whole_with_the_umask_s_mode(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "new" / "a.json", {"a": 1})
        with replacing(tmp_path / "b") as partial:
            partial.unlink()
            partial.write_text("x")
            partial.chmod(0o600)  # what a library may do
    finally:
        os.umask(before)
    files = [tmp_path / "b", tmp_path / "new" / "a.json"]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o640] * 2
    assert json.loads(files[1].read_text()) == {"a": 1}


def test_a_write_that_fails_leaves_the_old_content_or_nothing(tmp_path, monkeypatch):
    """A full disk; what a library raises for one; an error of the writer itself."""
    path, full = tmp_path / "a", RuntimeError("stream writer failed")
    write_text(path, "old")
    for error, kind in ((full, WriteFailed), (KeyError("bug"), KeyError)):
        for place in (path, tmp_path / "b"):
            with pytest.raises(kind), replacing(place, (RuntimeError,)):
                raise error
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=NO_SPACE))
    for place in (path, tmp_path / "b"):
        with pytest.raises(WriteFailed, match=str(place)):
            write_text(place, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_hash_of_json_does_not_depend_on_the_order_of_keys():
    assert short_hash({"a": 1, "b": (2,)}) == short_hash({"b": [2], "a": 1})
    assert short_hash({"a": 1}) != short_hash({"a": 2})


class LinesMachine(RuleBasedStateMachine):
    """A file of JSON lines under writes, full disks, kills and damage, against a list."""

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp())
        self.path, self.records, self.torn = self.folder / "new" / "f", [], False
        self.writer = mock.Mock()  # nothing to close yet
        self.reopen()

    def teardown(self):
        self.writer.close()
        shutil.rmtree(self.folder)

    @rule(text=st.sampled_from(["", "zwölf", "\ud800", '"\n', "long" * 9]))
    def append(self, text):
        self.records.append({"text": text})
        self.writer.append(self.records[-1])

    @rule(room=st.integers(0, 9))
    def fill_the_disk(self, room):
        plain, left = os.write, [room]

        def write(handle, data):
            if not left[0]:
                raise NO_SPACE
            part, left[0] = data[: left[0]], left[0] - len(data[: left[0]])
            return plain(handle, part)

        with mock.patch("os.write", write), pytest.raises(WriteFailed, match="new/f"):
            self.writer.append({"text": "no room"})

    @rule()
    def reopen(self):
        self.writer.close()
        seen = []
        self.writer = ResumableWriter(self.path, seen.append)
        assert seen == self.records and (self.writer.torn is not None) == self.torn
        self.torn = False

    @precondition(lambda self: self.records)
    @rule(cut=st.floats(0, 1, exclude_max=True))
    def kill(self, cut):
        """In the middle of the last line."""
        self.writer.close()
        *lines, last = self.path.read_bytes().splitlines(keepends=True)
        left = last[: int(cut * len(last))]
        self.path.write_bytes(b"".join([*lines, left]))
        self.records.pop()
        self.torn = bool(left)
        self.reopen()

    @precondition(lambda self: self.records)
    @rule(data=st.data(), line=st.sampled_from([b"{", b"[1]", b'{"a": "\xff"}']))
    def damage(self, data, line):
        """A blank line inside the file is none; another one is named."""
        self.writer.close()
        content = self.path.read_bytes()
        lines = content.splitlines()
        number = data.draw(st.integers(1, len(lines)))
        lines[number - 1 : number - 1] = [b"", line]
        self.path.write_bytes(b"\n".join([*lines, b""]))
        for use in (lambda: ResumableWriter(self.path, print), lambda: [*read_lines(self.path)]):
            with pytest.raises(BadRow, match=f"f:{number + 1}: "):
                use()
        self.path.write_bytes(content)
        self.reopen()

    @invariant()
    def readers_see_whole_lines(self):
        places = [f"{self.path}:{n}" for n in range(1, len(self.records) + 1)]
        assert list(read_lines(self.path)) == list(zip(places, self.records, strict=True))


LinesMachine.TestCase.settings = SETTINGS
TestLines = LinesMachine.TestCase


class PlaceMachine(RuleBasedStateMachine):
    """A folder or a file that commands claim, fill, empty and damage."""

    claims = st.tuples(st.sampled_from(["train", "eval run"]), st.sampled_from([(1, 2), "a"]))

    @initialize(is_file=st.booleans())
    def begin(self, is_file):
        self.folder, self.is_file = Path(tempfile.mkdtemp()), is_file
        self.path = self.folder / "new" / "place"
        self.result = self.path if is_file else self.path / "result"
        name = ".place.hyperdflash.json" if is_file else "place/.hyperdflash.json"
        self.manifest = self.path.parent / name
        self.owner, self.run_id, self.held = None, None, ExitStack()

    def teardown(self):
        self.held.close()
        shutil.rmtree(self.folder)

    def claim(self, asked):
        kind, value = asked
        return claim(self.path, kind, {"data": {"path": value}, "n": 1}, is_file=self.is_file)

    @rule(asked=claims)
    def resume_or_begin(self, asked):
        self.held.close()
        content = self.result.is_file() and (not self.is_file or self.result.stat().st_size)
        before = sorted(self.folder.rglob("*"))
        if self.owner != asked and content:
            with pytest.raises(NotOurs) as refused:
                self.claim(asked).__enter__()
            assert "\n" not in str(refused.value) and sorted(self.folder.rglob("*")) == before
            if self.owner:
                wanted = "data.path was" if self.owner[0] == asked[0] else f"`{self.owner[0]}`"
                assert wanted in str(refused.value) and "n was" not in str(refused.value)
            return
        run_id = self.held.enter_context(self.claim(asked))
        assert (run_id == self.run_id) == (self.owner == asked)
        self.owner, self.run_id = asked, run_id
        written = json.loads(self.manifest.read_bytes())
        assert (written["kind"], written["run_id"]) == (asked[0], run_id)
        with pytest.raises(InUse, match=f"process {os.getpid()} "):
            self.claim(asked).__enter__()

    @rule()
    def end(self):
        self.held.close()

    @rule(content=st.sampled_from(["", "x"]))
    def fill(self, content):
        self.result.parent.mkdir(parents=True, exist_ok=True)
        self.result.write_text(content)

    @rule()
    def empty(self):
        self.result.unlink(missing_ok=True)

    @rule()
    def damage(self):
        self.held.close()
        if self.manifest.exists():
            self.manifest.write_text("{")
            self.owner = None


PlaceMachine.TestCase.settings = SETTINGS
TestPlace = PlaceMachine.TestCase


@pytest.mark.parametrize("look", ["_contents", "_manifest"])
def test_a_run_that_begins_while_another_looks_is_no_other_content(tmp_path, monkeypatch, look):
    """Of two that start together, one may see the other's files before its manifest."""
    plain, manifest = getattr(ownership, look), tmp_path / ownership.MANIFEST

    def looked(path, is_file):
        seen = plain(path, is_file)
        if not manifest.exists():
            manifest.write_text(json.dumps({"kind": "x", "run_id": "one", "settings": {}}))
            (tmp_path / "manifests").mkdir()
        return seen

    monkeypatch.setattr(ownership, look, looked)
    with claim(tmp_path, "x", {}) as run_id:
        assert run_id == "one"


def test_a_folder_of_data_is_locked_without_a_manifest(tmp_path):
    (tmp_path / "mine").write_text("x")
    with lock(tmp_path, "fetch"), pytest.raises(InUse), lock(tmp_path, "fetch"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with claim(tmp_path / "work", "train", {}), pytest.raises(NotOurs, match="`train`"):
        lock(tmp_path / "work", "fetch").__enter__()
    with pytest.raises(WriteFailed):
        claim(tmp_path / "mine" / "out", "train", {}).__enter__()


HOLDER = """
import os, sys, time
from pathlib import Path
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.ownership import claim
print("ready", flush=True)
sys.stdin.readline()
try:
    with claim(Path(sys.argv[1]), "train", {}):
        in_child = os.fork() == 0  # which keeps no lock
        if in_child:
            print("held", flush=True)
        sys.stdin.read()
        if in_child:
            os._exit(0)
except HyperDFlashError as error:
    print(type(error).__name__, flush=True)
"""


def holder(folder) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    process = subprocess.Popen(command, start_new_session=True, **options)
    assert process.stdout.readline() == "ready\n"
    return process


def test_of_runs_that_start_together_one_gets_the_folder_until_it_dies(tmp_path):
    folder = tmp_path / "new"
    holders = [holder(folder) for _ in range(5)]
    try:
        for process in holders:
            process.stdin.write("\n")
        # Whoever holds the folder does so until all have said what they got.
        replies = [process.stdout.readline() for process in holders]
        assert sorted(replies) == ["InUse\n"] * 4 + ["held\n"]
        process = holders[replies.index("held\n")]
        with pytest.raises(InUse, match=f"process {process.pid} "):
            claim(folder, "train", {}).__enter__()
        first = json.loads((folder / ".hyperdflash.json").read_text())["run_id"]
        process.kill()
        process.wait()
        with claim(folder, "train", {}) as run_id:
            assert run_id == first
    finally:
        for process in holders:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
