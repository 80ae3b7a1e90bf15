"""Server flags and request parameters that HYPERDFLASH refuses, before any model is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.serving.startup import checks
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import DrafterShape
from tests.unit.hub_cache import hub_home, use_hub_home
from tests.unit.serving.v4_shapes import FLASH, PRO, draft_folder, target_folder


@pytest.fixture
def arguments(target_dir, drafter_dir, monkeypatch):
    """Arguments that pass; SGLang itself has already applied the hooks in a real launch."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(target_dir), speculative_draft_model_path=str(drafter_dir), device="cpu"
    )


def test_the_committed_pair_is_accepted(arguments):
    checks.validate_server_args(arguments)
    arguments.speculative_num_draft_tokens = 7
    checks.validate_server_args(arguments)


def test_a_drafter_s_hub_id_is_read_from_the_hub_s_cache(
    arguments, drafter_dir, tmp_path, monkeypatch
):
    hub_home(tmp_path, drafter_dir, "owner/drafter")
    use_hub_home(monkeypatch, tmp_path)
    arguments.speculative_draft_model_path = "owner/drafter"
    checks.validate_server_args(arguments)
    arguments.speculative_draft_model_path = "owner/gone"
    with pytest.raises(HyperDFlashConfigError, match="cannot read the draft config of owner/gone"):
        checks.validate_server_args(arguments)


def test_a_window_is_refused_where_pools_are_resized_after_capture(arguments, monkeypatch):
    config = checks.load_draft_config(arguments)
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    checks.validate_server_args(arguments)
    windowed = replace(config, window=64)
    monkeypatch.setattr(checks, "load_draft_config", lambda server_args: windowed)
    with pytest.raises(HyperDFlashConfigError, match="POST_CAPTURE_KV_SIZING=1 with a windowed"):
        checks.validate_server_args(arguments)
    monkeypatch.delenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
    checks.validate_server_args(arguments)


def test_released_memory_must_not_hold_the_only_copy_of_the_drafter(arguments):
    arguments.enable_memory_saver = True
    with pytest.raises(HyperDFlashConfigError, match="Add --enable-draft-weights-cpu-backup"):
        checks.validate_server_args(arguments)
    arguments.enable_draft_weights_cpu_backup = True
    checks.validate_server_args(arguments)


def test_a_width_beyond_the_block_is_refused_before_the_target_loads(arguments, monkeypatch):
    monkeypatch.setenv("HYPERDFLASH_WIDTH", "8")
    with pytest.raises(HyperDFlashConfigError, match="from 1 to the drafter's block size 7"):
        checks.validate_server_args(arguments)


@pytest.mark.parametrize("target", [FLASH, PRO])
def test_a_block_beyond_v4s_compressor_rings_is_refused_before_the_target_loads(
    arguments, tmp_path, target
):
    """Rings of 16 rows, windows of 8: at most ten rows (``tests/engine/v4/test_planner.py``)."""
    arguments.model_path, arguments.load_format = str(target_folder(tmp_path, target)), "dummy"
    drafters = [
        str(draft_folder(tmp_path / f"{block}", target, DrafterShape(block_size=block)))
        for block in (10, 11)
    ]
    arguments.speculative_draft_model_path = drafters[0]
    checks.validate_server_args(arguments)
    arguments.speculative_draft_model_path = drafters[1]
    with pytest.raises(HyperDFlashConfigError, match=r"at most 10 rows .* block size 11") as caught:
        checks.validate_server_args(arguments)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("found", ["sharp", "1.5", "-0.1", "nan"])
def test_a_bad_draft_temperature_is_refused_before_the_target_loads(arguments, monkeypatch, found):
    monkeypatch.setenv("HYPERDFLASH_DRAFT_TEMPERATURE", found)
    with pytest.raises(HyperDFlashConfigError, match=f"from 0 .* to 1 .*; found '{found}'"):
        checks.validate_server_args(arguments)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("HYPERDFLASH_WIDTH", "1", "nothing is drafted"),
        ("HYPERDFLASH_FOLLOW", __file__, "found the file"),
        ("speculative_draft_load_format", "dummy", "no weights to return to"),
        ("enable_dp_attention_local_control_broadcast", True, "local control broadcast"),
        ("speculative_draft_model_quantization", "fp8", "takes no new weights"),
    ],
)
def test_drafters_are_followed_only_where_they_can_be_served_and_judged(
    arguments, monkeypatch, tmp_path, name, value, message
):
    monkeypatch.setenv("HYPERDFLASH_FOLLOW", str(tmp_path / "not yet there"))
    checks.validate_server_args(arguments)
    if name.isupper():
        monkeypatch.setenv(name, value)
    else:
        assert hasattr(arguments, name)
        setattr(arguments, name, value)
    with pytest.raises(HyperDFlashConfigError, match=f"HYPERDFLASH_FOLLOW: .*{message}"):
        checks.validate_server_args(arguments)
    monkeypatch.delenv("HYPERDFLASH_FOLLOW")
    monkeypatch.delenv("HYPERDFLASH_WIDTH", raising=False)
    checks.validate_server_args(arguments)


@pytest.mark.parametrize("architecture, served", [("HYV4ForCausalLM", False), (None, True)])
def test_two_batch_overlap_is_refused_where_sglang_has_none(arguments, architecture, served):
    raw = json.loads((Path(arguments.model_path) / "config.json").read_text())
    config = checks.load_draft_config(arguments)
    if architecture:
        raw["architectures"] = [architecture]
        known = replace(config.target, architecture=architecture)
        config = replace(config, target=known)
    target = SimpleNamespace(to_dict=lambda: raw)
    checks._check_served_target(arguments, target, config)
    arguments.enable_two_batch_overlap = True
    if served:
        return checks._check_served_target(arguments, target, config)
    with pytest.raises(HyperDFlashConfigError, match="enable_two_batch_overlap with HY-V4"):
        checks._check_served_target(arguments, target, config)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("tokenizer_worker_num", 2, "tokenizer_worker_num=2"),
        ("pp_size", 2, "HYPERDFLASH does not support pp_size=2"),
        ("enable_lora", True, "enable_lora=True"),
        ("lora_paths", ["a=b"], "lora_paths"),
        ("enable_hisparse", True, "enable_hisparse"),
        ("enable_unified_memory", True, "enable_unified_memory"),
        ("enable_hierarchical_cache", True, "enable_hierarchical_cache"),
        ("speculative_adaptive", True, "speculative_adaptive"),
        ("rl_on_policy_target", "fsdp", "rl_on_policy_target='fsdp'"),
        ("speculative_accept_threshold_single", 0.9, "changes the output distribution"),
        ("speculative_accept_threshold_acc", 0.9, "changes the output distribution"),
        ("speculative_draft_window_size", 64, "full context"),
        ("context_length", 4096, "Pass --context-length 2048"),
        ("use_ray", True, "Ray"),
        ("enable_return_hidden_states", True, "residual before the collapse"),
        ("return_hidden_states_mode", "last", "residual before the collapse"),
        ("grammar_backend", "outlines", "use --grammar-backend xgrammar"),
        ("enable_pdmux", True, "enable_pdmux"),
        ("speculative_draft_load_format", "pt", "safetensors only"),
        ("speculative_num_draft_tokens", 16, "trained with block size 7"),
        ("speculative_dflash_block_size", 4, "trained with block size 7"),
        ("smg_grpc_mode", True, "use HTTP"),
        ("json_model_override_args", '{"num_hidden_layers": 4}', "num_hidden_layers.*config.json"),
        ("decrypted_config_file", "/config.json", "config.json"),
        ("decrypted_draft_config_file", "/config.json", "config.json"),
        ("SGLANG_RUST_SERVER", "1", "SGLANG_RUST_SERVER=1"),
        ("speculative_draft_model_path", None, "needs --speculative-draft-model-path"),
        ("speculative_draft_model_path", "/nowhere/draft", "no config.json in"),
    ],
)
def test_refused_flags(arguments, monkeypatch, name, value, message):
    if name.isupper():
        monkeypatch.setenv(name, value)
    else:
        setattr(arguments, name, value)
    with pytest.raises(HyperDFlashConfigError, match=message):
        checks.validate_server_args(arguments)


def test_every_refused_flag_is_a_real_sglang_field():
    from sglang.srt.arg_groups.overrides import field_names
    from sglang.srt.server_args import ServerArgs

    saved = {"enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"}
    assert set(checks.UNSUPPORTED) | saved <= set(field_names(ServerArgs))


def test_pickled_weights_are_refused(arguments, drafter_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((drafter_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    arguments.speculative_draft_model_path = str(tmp_path)
    with pytest.raises(HyperDFlashConfigError, match="pickled weights are not loaded"):
        checks.validate_server_args(arguments)


def test_a_mask_embedding_for_the_target_is_refused(arguments, drafter_dir, tmp_path):
    """SGLang's DFLASH worker would write it into the target's table, with dummy weights too."""
    copy = shutil.copytree(drafter_dir, tmp_path / "draft")
    torch.save({"mask_token_id": 3, "embedding": torch.ones(256)}, copy / "mask_embedding.pt")
    arguments.speculative_draft_model_path = str(copy)
    for load_format in ("auto", "dummy"):
        arguments.load_format = load_format
        with pytest.raises(HyperDFlashConfigError, match=f"{copy}/mask_embedding.pt"):
            checks.validate_server_args(arguments)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:count])


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: cut(p, p.stat().st_size - 9),
        lambda p: cut(p, 100),
        lambda p: cut(p, 0),
        lambda p: p.write_bytes(p.read_bytes() + b"x"),
    ],
)
def test_a_damaged_drafter_is_refused_before_the_target_loads(
    arguments, drafter_dir, tmp_path, damage
):
    """Found as: the target was loaded first, and a truncated file ended in a traceback."""
    copy = shutil.copytree(drafter_dir, tmp_path / "draft")
    damage(copy / "model.safetensors")
    arguments.speculative_draft_model_path = str(copy)
    message = f"{copy}/model.safetensors is damaged or cut short"
    with pytest.raises(HyperDFlashConfigError, match=message) as caught:
        checks.validate_server_args(arguments)
    assert len(str(caught.value).splitlines()) == 1
    arguments.load_format = "dummy"
    checks.validate_server_args(arguments)


def test_a_drafter_of_another_target_is_refused_before_it_loads(arguments, target_dir, tmp_path):
    target = shutil.copytree(target_dir, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights[next(name for name in weights if name.endswith("hc_base"))] += 1.0
    save_file(weights, target / "model.safetensors")
    arguments.model_path = str(target)
    with pytest.raises(HyperDFlashConfigError, match="made for another target: its hc_head"):
        checks.validate_server_args(arguments)
    (target / "model.safetensors").unlink()
    checks.validate_server_args(arguments)  # SGLang's loader says what is wrong with the target
