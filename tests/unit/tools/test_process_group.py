"""No process of a server outlives what started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hyperdflash.tools.server_process import Server
from tests.conftest import ROOT
from tests.waiting import PATIENCE, until

# A server with a child that ignores every polite signal.
SERVER = """
import subprocess, sys, time
child = "import signal, time;"
child += "[signal.signal(number, signal.SIG_IGN) for number in (1, 2, 15)];"
child += "print('child', flush=True); time.sleep(7200)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(7200)
"""
# A command with two servers, started in threads as some studies do: those end, the servers do not.
COMMAND = """
import sys, threading, time
from pathlib import Path
from sglang_hyperdflash.tools.process_group import exit_on_signals
from sglang_hyperdflash.tools.server_process import Server

signals = exit_on_signals()
signals.__enter__()
found = []

def start(name):
    launcher = (sys.executable, "-c", sys.argv[2])
    found.append(Server("any", log=Path(sys.argv[1]) / name, launcher=launcher))

for name in ("a", "b"):
    thread = threading.Thread(target=start, args=(name,))
    thread.start()
    thread.join()
print(*(server.process.pid for server in found), flush=True)
with found[0], found[1]:
    time.sleep(7200)
"""


def members(session: int) -> list[int]:
    """The living processes of a session; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            pid = int(entry.name)
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getsid(pid) == session and state != "Z":
                found.append(pid)
        except (ValueError, OSError):
            continue
    return found


@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGINT, None),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_server_outlives_its_command(tmp_path, number, code):
    """Found as: ``timeout -s TERM 45 hyperdflash demo`` left two servers of 2.4 GB, spinning."""
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path), SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    sessions = [int(pid) for pid in command.stdout.readline().split()]
    assert len(sessions) == 2
    try:
        for name in ("a", "b"):
            log = tmp_path / name
            until(lambda log=log: "child" in log.read_text(), "no child started")
        assert [len(members(session)) for session in sessions] == [2, 2]
        command.send_signal(number)
        ended = command.wait(PATIENCE)
        assert code is None or ended == code
        until(lambda: not any(map(members, sessions)), "processes were left")
    finally:
        command.kill()
        command.wait()
        for pid in [pid for session in sessions for pid in members(session)]:
            os.kill(pid, signal.SIGKILL)


def started(tmp_path) -> Server:
    """A server with its child running."""
    server = Server("any", log=tmp_path / "log", launcher=(sys.executable, "-c", SERVER))
    until(lambda: "child" in server.log.read_text(), "no child started")
    return server


def pending(pid: int) -> set[int]:
    """Signals that a process has been sent and has not been given; none of one that has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":\t", 1) for line in lines)
    mask = 0 if found["State"].startswith("Z") else int(found["ShdPnd"], 16)
    return {number for number in signal.Signals if mask >> number - 1 & 1}


def test_a_signal_to_the_guard_leaves_no_process(tmp_path):
    """Found as: after SIGTERM of a whole cgroup a child that ignores it outlived ``stop``."""
    server = started(tmp_path)
    session = server.process.pid
    server._guard._shell.terminate()
    until(lambda: signal.SIGTERM not in pending(server._guard._shell.pid), "it never arrived")
    server.stop()
    until(lambda: not members(session), "processes were left")


def test_a_forked_child_does_not_keep_servers(tmp_path):
    """Found as: ``stop`` hung as long as a forked child of the command lived."""
    server = started(tmp_path)
    session, child = server.process.pid, os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        server._guard._shell.stdin.close()  # as at the end of this process
        until(lambda: not members(session), "the child keeps the guard's pipe open")
        server.stop()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_proxy_is_not_asked_for_loopback(tmp_path, monkeypatch):
    """Found as: a server behind ``http_proxy`` never became ready."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    health = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
    launcher = (sys.executable, "-c", health)
    with Server("any", log=tmp_path / "log", launcher=launcher) as server:
        server.wait(PATIENCE)
    assert os.environ["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_a_signal_while_a_process_starts_is_answered_when_it_is_held():
    script = """
import os, signal
from sglang_hyperdflash.tools.process_group import exit_on_signals, signals_deferred
with exit_on_signals():
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        print("held", flush=True)
    print("not reached")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout) == (143, "held\n")


def test_a_signal_to_a_command_that_has_ended_prints_no_traceback():
    """Found as: torchrun ended a failed training's processes while Python shut them down."""
    script = """
import atexit, os, signal
from sglang_hyperdflash.tools.process_group import exit_on_signals
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))

@exit_on_signals()
def main():
    return 2

raise SystemExit(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, "")


def test_a_command_under_nohup_goes_on_after_a_hang_up():
    script = """
import os, signal
from sglang_hyperdflash.tools.process_group import exit_on_signals, signals_deferred
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with exit_on_signals():
    os.kill(os.getpid(), signal.SIGHUP)
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGHUP)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=PATIENCE)
    assert ended.returncode == 0
