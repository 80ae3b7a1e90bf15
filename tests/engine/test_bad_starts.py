"""Bad checkpoints and flags: the real command line ends with one clear message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import FP32
from tests.waiting import PATIENCE
from tests.warm_start.client import ENVIRONMENT, finish, start


def copy_of(folder, tmp_path):
    """A checkpoint folder that a test may damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path)


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
    "tokenizer_worker_num": ("--tokenizer-worker-num", "2"),
    "smg_grpc_mode": ("--grpc-mode",),
    "block size": ("--speculative-num-draft-tokens", "16"),
    "distribution": ("--speculative-accept-threshold-single", "0.5"),
    "hyper-connection": (),
}


def test_flags_and_targets_through_sglangs_own_resolution(tmp_path, target_dir, drafter_dir):
    folder = copy_of(target_dir, tmp_path)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config |= {"hidden_size": 256, "vocab_size": 1363}
    (folder / "config.json").write_text(json.dumps(config))
    asked = []
    for name, arguments in REFUSED.items():
        target = folder if name == "hyper-connection" else target_dir
        asked.append(["--model-path", str(target), *hyperdflash_arguments(drafter_dir), *arguments])
    process = start(
        [sys.executable, "-c", RESOLVE, json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    ended = finish(process, PATIENCE)
    (line,) = [x for x in ended.stdout.splitlines() if x.startswith("SAID")] or [ended.stderr]
    said = json.loads(line.removeprefix("SAID"))
    for name, text in zip(REFUSED, said, strict=True):
        assert name in text


def flip_hc_head(weights):
    name = next(name for name in weights if name.endswith("hc_base"))
    weights[name] = weights[name] + 1.0


def set_nan(weights):
    weights["layers.0.mlp.up_proj.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(
    "which, edit, message",
    [
        ("draft", set_nan, "layers.0.mlp.up_proj.weight"),
        # By the same way; tests/unit/draft/test_checkpoint.py has the others.
        pytest.param("target", flip_hc_head, "another target", marks=pytest.mark.slow),
    ],
)
def test_damaged_checkpoints_through_a_real_server(
    tmp_path, target_dir, drafter_dir, which, edit, message
):
    folder = copy_of(target_dir if which == "target" else drafter_dir, tmp_path)
    edit_weights(folder, edit)
    target = folder if which == "target" else target_dir
    draft = folder if which == "draft" else drafter_dir
    log = tmp_path / "server.log"
    arguments = (*FP32, *hyperdflash_arguments(draft))
    server = Server(target, *arguments, log=log, start=start)
    with server, pytest.raises(ServerFailed):
        server.wait(PATIENCE)
    assert message in log.read_text(errors="replace")
