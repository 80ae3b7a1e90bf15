"""What a target's files say of it."""

import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.targets.files import DTYPE_NAMES, TargetFacts, TargetFiles, model_dtype
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.local_target import BorrowedTarget
from tests.conftest import ROOT
from tests.unit.hub_cache import hub_home, use_hub_home
from tests.unit.shards import split
from tests.waiting import PATIENCE

# Two processes that have nothing in the cache, and then one without a network.
READ_TABLES = """
import os
from huggingface_hub import constants
from sglang_hyperdflash.targets import files

def read():
    target = files.TargetFiles("owner/name")
    tables = (target.tensor(f"{name}.weight") for name in ("embed_tokens", "lm_head"))
    print(f" {sum(table.sum().item() for table in tables)}", end="", flush=True)  # in one piece

files.LARGE = 2**16
for _ in range(2):
    if not os.fork():
        read()
        os._exit(0)
for _ in range(2):
    os.wait()
constants.HF_HUB_OFFLINE = True
read()
"""


class Hub(SimpleHTTPRequestHandler):
    """A hub of one repository at one commit, in a folder; ``whole``: the files read whole."""

    def __init__(self, whole: list[str], *given, **options) -> None:
        self.whole = whole
        super().__init__(*given, **options)

    def translate_path(self, path: str) -> str:
        place, _, name = path.rpartition("/")
        return super().translate_path(name if place == "/owner/name/resolve/main" else "none")

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{Path(self.path).name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file() and "range" not in self.headers:
            self.whole.append(path.name)
        super().do_GET()


@pytest.mark.heavy
def test_the_processes_of_a_node_read_a_table_of_the_hub_once(tmp_path, target_dir):
    target, whole = shutil.copytree(target_dir, tmp_path / "target"), []
    shards, handler = split(target), partial(Hub, whole, directory=target)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        environment |= {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
        printed = subprocess.check_output(
            [sys.executable, "-c", READ_TABLES], env=environment, text=True, timeout=PATIENCE
        )
        server.shutdown()
    local = TargetFiles(str(target_dir))
    tables = (local.tensor(f"{name}.weight").sum().item() for name in ("embed_tokens", "lm_head"))
    assert printed.split() == [str(sum(tables))] * 3
    assert sorted(whole) == [*(path.name for path in shards), "model.safetensors.index.json"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_hub_target_comes_from_the_cache_alone(tmp_path, target_dir, monkeypatch, shards):
    target = shutil.copytree(target_dir, tmp_path / "target")
    files = split(target, shards) if shards > 1 else [target / "model.safetensors"]
    snapshot = hub_home(tmp_path / "home", target, "owner/name")
    use_hub_home(monkeypatch, tmp_path / "home")
    cached, local = TargetFiles("owner/name"), TargetFiles(str(target_dir))
    facts = TargetFacts.from_config(cached.config())
    gates = (each.hc_head(facts.hc_mult, facts.hidden_size) for each in (cached, local))
    assert all(map(torch.equal, *gates))
    expected = BorrowedTarget(local).state_dict()
    for name, tensor in BorrowedTarget(cached).state_dict().items():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    for file in files:
        (snapshot / file.name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"owner/name .*{files[0].name[:5]}"):
        TargetFiles("owner/name").hc_head(facts.hc_mult, facts.hidden_size)


def test_data_types_are_named_and_chosen_as_sglang_does():
    from sglang.srt.configs.model_config import _STR_DTYPE_TO_TORCH_DTYPE, _get_and_verify_dtype

    for config, dtype in (
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "half"}, "float16"),
        ({"torch_dtype": "float32"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "float16"),
        ({}, "float16"),
        ({"torch_dtype": "float32", "model_type": "gemma3"}, "bfloat16"),
    ):
        assert model_dtype("auto", config) == dtype
        assert str(_get_and_verify_dtype(config, "auto")) == f"torch.{dtype}"
    names = {name: str(dtype) for name, dtype in _STR_DTYPE_TO_TORCH_DTYPE.items()}
    assert {name: f"torch.{model_dtype(name, {})}" for name in DTYPE_NAMES} == names
    with pytest.raises(HyperDFlashConfigError, match=r"--dtype .*int8"):
        model_dtype("int8", {})
