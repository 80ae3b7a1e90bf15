"""Bad checkpoints and flags: the real command line ends with one clear message."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32
from tests.waiting import PATIENCE
from tests.warm_start.client import ENVIRONMENT, finish, start

pytestmark = pytest.mark.slow
RESOLVE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
said = []
for arguments in json.loads(sys.argv[1]):
    try:
        prepare_server_args(arguments).resolve_once()
        said.append("accepted")
    except (Exception, SystemExit) as error:
        said.append(str(error))
print("SAID", json.dumps(said))
"""
# What SGLang's own resolution of arguments refuses, and what the refusal names.
REFUSED = {
    "smg_grpc_mode": ("--grpc-mode",),
    "block size": ("--speculative-num-draft-tokens", "16"),
    "distribution": ("--speculative-accept-threshold-single", "0.5"),
    "hyper-connection": (),
}


def test_flags_and_targets_through_sglangs_own_resolution(tmp_path, target_dir, drafter_dir):
    plain = shutil.copytree(target_dir, tmp_path / "plain")
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    fields |= {"hidden_size": 256, "vocab_size": 1363}
    (plain / "config.json").write_text(json.dumps(fields))
    asked = []
    for name, arguments in REFUSED.items():
        target = plain if name == "hyper-connection" else target_dir
        asked.append(["--model-path", str(target), *hyperdflash_arguments(drafter_dir), *arguments])
    options = {"env": {**os.environ, **ENVIRONMENT}, "start_new_session": True, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", RESOLVE, json.dumps(asked)]
    ended = finish(start(command, **options, **pipes), PATIENCE)
    (line,) = [x for x in ended.stdout.splitlines() if x.startswith("SAID")] or [ended.stderr]
    said = json.loads(line.removeprefix("SAID"))
    for name, text in zip(REFUSED, said, strict=True):
        assert name in text


def test_a_damaged_drafter_through_a_real_server(tmp_path, target_dir, drafter_dir):
    folder, log = shutil.copytree(drafter_dir, tmp_path / "copy"), tmp_path / "server.log"
    weights, name = load_file(folder / "model.safetensors"), "layers.0.mlp.up_proj.weight"
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    arguments = (*FP32, *hyperdflash_arguments(folder))
    server = Server(target_dir, *arguments, log=log, start=start)
    with server, pytest.raises(ServerFailed):
        server.wait(PATIENCE)
    assert name in log.read_text(errors="replace")


def test_a_refusal_at_launch_is_one_sentence(tmp_path, target_dir, drafter_dir):
    """Other errors keep their traceback."""
    ours = hyperdflash_arguments(drafter_dir)
    for arguments, words, traceback in (
        ((*ours, "--pp-size", "2"), "HYPERDFLASH does not support pp_size=2", False),
        (hyperdflash_arguments(EXAMPLE / "dflash"), "DFlashDraftModel", False),
        (("--tp-size", "2", "--dp-size", "3", "--enable-dp-attention"), "", True),
    ):
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        with (
            Server(target_dir, *arguments, log=log, start=start) as server,
            pytest.raises(ServerFailed),
        ):
            server.wait(PATIENCE)
        said = log.read_text(errors="replace")
        assert server.process.returncode not in (0, None)
        assert words in said.splitlines()[-1] and ("Traceback" in said) is traceback, said
