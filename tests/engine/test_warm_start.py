"""A server forked from the template is, serves and ends as one that was really launched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from sglang_hyperdflash.serving.width.settings import FULL, WIDTH
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import FP32, greedy_all, ids, install_plugin
from tests.unit.test_warm_start import running
from tests.waiting import PATIENCE, until
from tests.warm_start import client
from tests.warm_start.template import REFUSED

# A plugin: every process of the server writes, over and over, what it is.
TELLER = '''
import contextlib
import json
import os
import sys
import threading
import time
import types
from pathlib import Path


def load():
    threading.Thread(target=tell, daemon=True).start()


def tell():
    path = Path(os.environ["TOLD"]) / f"{os.getpid()}.json"
    while True:
        time.sleep(0.5)
        with contextlib.suppress(RuntimeError):  # what an import in another thread changes
            found = facts()
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").rename(path)


def facts():
    import setproctitle

    from sglang_hyperdflash import seams

    title = setproctitle.getproctitle()
    found = {"title": title if title.startswith("sglang::") else "server"}
    found |= {"seams": sorted(seams.in_place), "environment": dict(os.environ)}
    found |= {"arguments": sys.argv, "folder": os.getcwd(), "path": sys.path}
    return found | {"hooked": sorted(hooked())}


def hooked():
    """Names in modules of what a hook has wrapped."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            code = getattr(value, "__code__", None) if type(value) is types.FunctionType else None
            if code and code.co_filename.endswith("hook_registry.py") and code.co_name == "wrapper":
                yield f"{name}.{attribute}"
'''
# Another one in every start.
OWN = {"SGLANG_RUN_ID", "TOLD", "PYTHONPATH", "PROMETHEUS_MULTIPROC_DIR", "_"}


class Started:
    """One HYPERDFLASH server whose processes tell what they are."""

    def __init__(self, start, target_dir: Path, drafter_dir: Path, folder: Path) -> None:
        told = folder / "told"
        told.mkdir()
        environment = install_plugin(folder, "teller", TELLER) | {"TOLD": str(told), WIDTH: FULL}
        arguments = (*FP32, "--enable-metrics", *hyperdflash_arguments(drafter_dir))
        self.log, self.folder = folder / "server.log", told
        self.server = Server(
            target_dir, *arguments, log=self.log, environment=environment, start=start
        )

    def told(self) -> dict[str, dict]:
        """By title, what each process says now."""
        for _ in range(2):  # it may have looked before it wrote the first one
            for path in self.folder.glob("*.json"):
                path.unlink()
            until(lambda: len(list(self.folder.glob("*.json"))) >= 3)
        found = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return {f["title"]: f for f in found}

    def common(self, told: dict) -> dict:
        """What a process told, less what is another one in every start."""
        names = {str(self.server.port): "port", str(self.folder.parent): "folder"}
        told = told | {"path": list(dict.fromkeys(told["path"]))}
        for key in ("arguments", "path"):
            told[key] = [names.get(text, text) for text in told[key]]
        environment = {n: v for n, v in told["environment"].items() if n not in OWN}
        return {**told, "environment": environment, "seams": None, "hooked": None}

    def family(self) -> dict[int, str]:
        """Every process of the server, by id, with its command line."""
        parent = psutil.Process(self.server.process.pid)
        family = [parent, *parent.children(recursive=True)]
        return {process.pid: " ".join(process.cmdline()) for process in family}


@pytest.fixture(scope="module")
def pair(target_dir, drafter_dir, tmp_path_factory):
    """A server started warm and one that was launched, both ready."""
    before = len(client.ordinary_starts)
    started = []
    try:
        for start in (client.start, subprocess.Popen):
            folder = tmp_path_factory.mktemp("started")
            started.append(Started(start, target_dir, drafter_dir, folder))
        for one in started:
            one.server.wait(PATIENCE)
        if client.why_ordinary(started[0].server.command):
            pytest.skip("the template is switched off")
        assert len(client.ordinary_starts) == before
        yield started
    finally:
        for one in started:
            one.server.stop()


def test_answers_and_accepted_drafts_are_the_same(pair, own_prompts):
    warm, cold = (greedy_all(one.server, own_prompts[:4], 1) for one in pair)
    assert ids(warm) == ids(cold)
    assert len({tuple(answer) for answer in ids(warm)}) == 4
    histograms = [
        [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
        for answers in (warm, cold)
    ]
    assert histograms[0] == histograms[1]
    assert sum(sum(histogram[1:]) for histogram in histograms[0]) > 0


REQUESTS = "sglang.srt.managers.tokenizer_manager:"


def test_every_process_is_what_it_is_after_a_launch(pair):
    """HTTP server, scheduler and detokenizer: what they were given, and the hooks in place."""
    warm, cold = (one.told() for one in pair)
    assert set(warm) == set(cold) and len(warm) == 3
    for title, found in cold.items():
        assert pair[0].common(warm[title]) == pair[1].common(found)
        if "detokenizer" in title:
            # It imports less than the other two; a hook that it has no use for is in place.
            assert set(found["seams"]) < set(warm[title]["seams"])
        else:
            # Nor does a launched scheduler import what checks requests before it and answers.
            unused = {one for one in warm[title]["seams"] if one.startswith(REQUESTS)}
            expected = set(warm[title]["seams"]) - (unused if "scheduler" in title else set())
            assert set(found["seams"]) == expected != set() != unused
            # A fork has more modules, so more names of one function.
            assert set() < set(found["hooked"]) <= set(warm[title]["hooked"])


def test_the_log_is_the_servers_own(pair):
    warm, cold = (one.log.read_text(errors="replace") for one in pair)
    assert REFUSED not in warm
    for text in (warm, cold):
        assert "The server is fired up and ready to roll!" in text
        assert "Traceback" not in text


def test_a_killed_scheduler_ends_the_server_and_nothing_is_left(pair):
    families, codes = [one.family() for one in pair], []
    for family in families:
        scheduler = next(pid for pid, line in family.items() if "scheduler" in line)
        os.kill(scheduler, signal.SIGKILL)
    for one in pair:
        codes.append(one.server.process.wait(PATIENCE))
        one.server.stop()
    until(lambda: not any(map(running, [pid for family in families for pid in family])))
    assert codes[0] == codes[1]
