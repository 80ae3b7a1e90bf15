"""Bad checkpoints and flags: the real command line ends with one clear message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.engine.conftest import FP32
from tests.waiting import PATIENCE
from tests.warm_start.client import ENVIRONMENT, start


def copy_of(folder, tmp_path):
    """A checkpoint folder that a test may damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        section = config
        *parents, last = name.split("__")
        for parent in parents:
            section = section[parent]
        section[last] = value
    path.write_text(json.dumps(config))


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path)


RESOLVE = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
args.resolve_once()
"""


def resolution_error(*arguments: str) -> str:
    """What SGLang's own argument resolution says, in a process of its own."""
    process = start(
        [sys.executable, "-c", RESOLVE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0, "the arguments were accepted"
    return errors


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tokenizer-worker-num", "2"), "does not support tokenizer_worker_num=2"),
        (("--grpc-mode",), "does not support smg_grpc_mode=True"),
        (("--speculative-num-draft-tokens", "16"), "trained with block size 7"),
        (("--speculative-accept-threshold-single", "0.5"), "changes the output distribution"),
    ],
)
def test_flags_through_sglangs_own_resolution(target_dir, drafter_dir, arguments, message):
    base = ("--model-path", target_dir, *hyperdflash_arguments(drafter_dir))
    assert message in resolution_error(*base, *arguments)


def test_a_plain_target_is_refused(tmp_path, target_dir, drafter_dir):
    folder = copy_of(target_dir, tmp_path)
    path = folder / "config.json"
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    path.write_text(json.dumps(config | {"hidden_size": 256, "vocab_size": 1363}))
    base = ("--model-path", folder, *hyperdflash_arguments(drafter_dir))
    assert "hyper-connection residual streams" in resolution_error(*base)


def flip_hc_head(weights):
    name = next(name for name in weights if name.endswith("hc_base"))
    weights[name] = weights[name] + 1.0


def set_nan(weights):
    weights["layers.0.mlp.up_proj.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(
    "which, edit, message",
    [
        ("target", flip_hc_head, "the drafter was made for another target"),
        ("draft", set_nan, "layers.0.mlp.up_proj.weight holds NaN"),
        # By the same way as NaN; tests/unit/draft/test_checkpoint.py has them all.
        pytest.param(
            *("draft", lambda w: w.pop("hidden_norm.weight"), "missing: hidden_norm.weight"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("draft", lambda w: w.update(stray=torch.zeros(3)), "unexpected tensor stray"),
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.slow
def test_nodes_of_different_settings_end_with_one_message_each(tmp_path, target_dir, drafter_dir):
    arguments = (*FP32, *hyperdflash_arguments(drafter_dir), "--tp-size", "2", "--nnodes", "2")
    arguments += ("--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank")
    name, logs = "HYPERDFLASH_DRAFT_TEMPERATURE", [tmp_path / "0.log", tmp_path / "1.log"]
    first, second = (
        Server(target_dir, *arguments, str(rank), log=log, start=start, environment=environment)
        for rank, (log, environment) in enumerate(zip(logs, ({}, {name: "0.5"}), strict=True))
    )
    with first, second:
        for node in (first, second):
            with pytest.raises(ServerFailed):
                node.wait(300)
    for log in logs:
        assert f"{name} must be the same on all nodes; found rank 0: unset; rank 1: 0.5" in (
            log.read_text(errors="replace")
        )
