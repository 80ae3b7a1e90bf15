"""What a target's files say of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.targets.files import DTYPE_NAMES, TargetFacts, TargetFiles, model_dtype
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.local_target import BorrowedTarget
from tests.conftest import ROOT
from tests.unit.hub_cache import hub_home, use_hub_home
from tests.unit.shards import split

READ_TABLES = """
from sglang_hyperdflash.targets import files
files.LARGE = 2**16
target = files.TargetFiles("owner/name")
print(sum(target.tensor(f"{name}.weight").sum().item() for name in ("embed_tokens", "lm_head")))
"""


class Hub(BaseHTTPRequestHandler):
    """One repository at one commit, ``folder``; ``whole`` collects files that are read whole."""

    folder: Path
    whole: list[str]

    def do_GET(self) -> None:
        place, _, name = self.path.rpartition("/")
        path = self.folder / name
        if place != "/owner/name/resolve/main" or not path.is_file():
            return self.send_error(404)
        content, part = path.read_bytes(), self.headers.get("range")
        if part:
            begin, end = map(int, part.removeprefix("bytes=").split("-"))
            content = content[begin : end + 1]
        elif self.command == "GET":
            self.whole.append(name)
        self.send_response(206 if part else 200)
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": "0" * 40, "Content-Length": len(content)}
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        """Nothing."""


def test_the_processes_of_a_node_read_a_table_of_the_hub_once(tmp_path, target_dir):
    """Found as: every process read both tables at every start, past the cache."""
    target = shutil.copytree(target_dir, tmp_path / "target")
    shards, whole = split(target), []
    hub = type("OneHub", (Hub,), {"folder": target, "whole": whole})
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        environment |= {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", READ_TABLES]
        kwargs = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **kwargs) for _ in range(2)]
        said = {process.communicate(timeout=240)[0] for process in processes}
        environment["HF_HUB_OFFLINE"] = "1"
        said.add(subprocess.run(command, timeout=240, check=False, **kwargs).stdout)
        server.shutdown()
    local = TargetFiles(str(target_dir))
    tables = (local.tensor(f"{name}.weight").sum().item() for name in ("embed_tokens", "lm_head"))
    assert said == {f"{sum(tables)}\n"}
    assert sorted(whole) == [*(path.name for path in shards), "model.safetensors.index.json"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_hub_target_comes_from_the_cache_without_a_network(
    tmp_path, target_dir, monkeypatch, shards
):
    """Found as: OfflineModeIsEnabled, where SGLang's own download was in the cache."""
    target = shutil.copytree(target_dir, tmp_path / "target")
    files = split(target, shards) if shards > 1 else [target / "model.safetensors"]
    snapshot = hub_home(tmp_path / "home", target, "owner/name")
    use_hub_home(monkeypatch, tmp_path / "home")
    hub, local = TargetFiles("owner/name"), TargetFiles(str(target_dir))
    facts = TargetFacts.from_config(hub.config())
    gates = (each.hc_head(facts.hc_mult, facts.hidden_size) for each in (hub, local))
    assert all(map(torch.equal, *gates))
    tensors = (BorrowedTarget(each).state_dict() for each in (hub, local))
    for (name, found), expected in zip(*(each.items() for each in tensors), strict=True):
        assert name == expected[0] and torch.equal(found, expected[1]), name
    for file in files:
        (snapshot / file.name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"owner/name has no {files[0].name[:5]}"):
        TargetFiles("owner/name").hc_head(facts.hc_mult, facts.hidden_size)


@pytest.mark.parametrize(
    "config, dtype",
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "half"}, "float16"),
        ({"torch_dtype": "float32"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "float16"),
        ({}, "float16"),
        ({"torch_dtype": "float32", "model_type": "gemma3"}, "bfloat16"),
    ],
)
def test_the_automatic_data_type_is_sglang_s(config, dtype):
    from sglang.srt.configs.model_config import _get_and_verify_dtype

    assert model_dtype("auto", config) == dtype
    assert str(_get_and_verify_dtype(config, "auto")) == f"torch.{dtype}"


def test_the_names_of_data_types_are_sglang_s():
    from sglang.srt.configs.model_config import _STR_DTYPE_TO_TORCH_DTYPE

    expected = {name: str(dtype) for name, dtype in _STR_DTYPE_TO_TORCH_DTYPE.items()}
    assert {name: f"torch.{model_dtype(name, {})}" for name in DTYPE_NAMES} == expected
    with pytest.raises(HyperDFlashConfigError, match=r"--dtype must be one of auto, .* found int8"):
        model_dtype("int8", {})
