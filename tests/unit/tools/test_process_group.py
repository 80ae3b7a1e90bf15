"""No process of a server outlives what started it, however that ends."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sglang_hyperdflash.tools import server_process
from sglang_hyperdflash.tools.errors import ServerFailed
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
servers = []

def start(name):
    launcher = (sys.executable, "-c", sys.argv[2])
    servers.append(Server("any", log=Path(sys.argv[1]) / name, launcher=launcher))

for name in ("a", "b"):
    thread = threading.Thread(target=start, args=(name,))
    thread.start()
    thread.join()
print(*(server.process.pid for server in servers), flush=True)
with servers[0], servers[1]:
    time.sleep(7200)
"""


def members(session: int) -> list[int]:
    """The living processes of a session; zombies do not count."""
    living = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.pid)
    return living


@pytest.mark.parametrize(
    ("number", "code"),
    [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", None), ("SIGKILL", -signal.SIGKILL)],
)
def test_no_server_outlives_its_command(tmp_path, number, code):
    arguments = [sys.executable, "-c", COMMAND, str(tmp_path), SERVER]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    command = subprocess.Popen(arguments, cwd=ROOT, **pipes)
    sessions = [int(pid) for pid in command.stdout.readline().split()]
    try:
        for name in ("a", "b"):
            log = tmp_path / name
            until(lambda log=log: "child" in log.read_text(), "no child started")
        assert [len(members(session)) for session in sessions] == [2, 2]
        command.send_signal(getattr(signal, number))
        ended = command.wait(PATIENCE)
        assert code in (None, ended)
        until(lambda: not any(map(members, sessions)), "processes were left")
    finally:
        command.kill()
        command.communicate()
        for pid in [pid for session in sessions for pid in members(session)]:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def server(tmp_path) -> Server:
    server = Server("any", log=tmp_path / "log", launcher=(sys.executable, "-c", SERVER))
    until(lambda: "child" in server.log.read_text(), "no child started")
    return server


def has_arrived(number: int, pid: int) -> bool:
    """Whether a signal is no longer pending."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines)
    return fields["State"].startswith("Z") or not int(fields["ShdPnd"], 16) >> number - 1 & 1


def test_a_signal_to_the_guard_leaves_no_process(server):
    """As SIGTERM of a whole cgroup sends it, too."""
    guard = server._guard._shell
    guard.terminate()
    until(lambda: has_arrived(signal.SIGTERM, guard.pid), "it never arrived")
    server.stop()
    until(lambda: not members(server.process.pid), "processes were left")


def test_a_forked_child_does_not_keep_servers(server):
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


HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def test_a_proxy_is_not_asked_for_loopback(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    launcher = (sys.executable, "-c", HEALTHY)
    with Server("any", log=tmp_path / "log", launcher=launcher) as server:
        server.wait(PATIENCE)
    assert os.environ["no_proxy"] == "example.org,127.0.0.1,localhost"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_wait_says_what_starts(tmp_path, monkeypatch, capsys, terminal):
    """Every time it looks, here; the server is not ready when it is asked first."""
    for name in ("ON_TERMINAL", "ELSEWHERE"):
        monkeypatch.setattr(server_process, name, 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    late = HEALTHY.replace("200", "answers.pop()").replace(
        "class", "answers = [200, 503]\nclass", 1
    )
    launcher = (sys.executable, "-c", late)
    with Server("any", log=tmp_path / "target.log", launcher=launcher) as server:
        server.wait(PATIENCE)
    said = capsys.readouterr().err
    assert "starting target ... " in said
    assert "\n" not in said if terminal else said.endswith(" s\n") and "\r" not in said


def test_a_later_server_leaves_the_earlier_one_s_log(tmp_path):
    log = tmp_path / "logs" / "server.log"
    for word in ("first", "second"):
        launcher = (sys.executable, "-c", f"print('the {word} died')")
        with Server("any", log=log, launcher=launcher) as server:
            with pytest.raises(ServerFailed, match=f"the {word} died") as failed:
                server.wait(PATIENCE)
            assert word == "first" or "first" not in str(failed.value)
    assert log.read_text() == "the first died\nthe second died\n"


HELD = """
with exit_on_signals():
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        print("held", flush=True)
    print("not reached")
"""
AFTER_THE_COMMAND = """
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
exit_on_signals()(lambda: None)()
"""
NOHUP = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with exit_on_signals():
    os.kill(os.getpid(), signal.SIGHUP)
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGHUP)
"""


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [(HELD, 143, "held\n"), (AFTER_THE_COMMAND, -signal.SIGTERM, ""), (NOHUP, 0, "")],
    ids=["while a process starts", "after the command", "under nohup"],
)
def test_a_signal_ends_a_command_where_it_may(script, code, said):
    imports = "import atexit, os, signal\nfrom sglang_hyperdflash.tools.process_group import *\n"
    arguments = [sys.executable, "-c", imports + script]
    ended = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, said, "")
