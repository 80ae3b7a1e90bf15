"""Server flags and request parameters that HYPERDFLASH refuses, before any model is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving import start_checks as checks
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


@pytest.fixture
def arguments(target_dir, drafter_dir, monkeypatch):
    """Arguments that pass; SGLang itself has already applied the hooks in a real launch."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return SimpleNamespace(
        model_path=str(target_dir),
        trust_remote_code=False,
        revision=None,
        speculative_draft_model_path=str(drafter_dir),
        speculative_draft_model_revision=None,
        speculative_num_draft_tokens=None,
        speculative_dflash_block_size=None,
        pp_size=1,
        context_length=None,
        disaggregation_mode="null",
    )


def test_the_committed_pair_is_accepted(arguments):
    checks.validate_server_args(arguments)
    arguments.speculative_num_draft_tokens = 7
    checks.validate_server_args(arguments)


def test_a_source_that_is_only_there_to_compare_with_is_refused(arguments, tmp_path):
    shutil.copytree(arguments.speculative_draft_model_path, tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    raw = json.loads(config.read_text())
    raw["hyperdflash_config"] |= {"source": "post_hc_head", "reducer": "fc"}
    config.write_text(json.dumps(raw))
    arguments.speculative_draft_model_path = str(tmp_path / "draft")
    with pytest.raises(HyperDFlashConfigError, match=r"source is post_hc_head, .* Train a drafter"):
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
        ("pp_size", 2, "pp_size=2"),
        ("enable_lora", True, "enable_lora=True"),
        ("lora_paths", ["a=b"], "lora_paths"),
        ("enable_hisparse", True, "enable_hisparse"),
        ("enable_unified_memory", True, "enable_unified_memory"),
        ("enable_hierarchical_cache", True, "enable_hierarchical_cache"),
        ("enable_lmcache", True, "enable_lmcache"),
        ("speculative_adaptive", True, "speculative_adaptive"),
        ("speculative_use_block_verification", True, "speculative_use_block_verification"),
        ("speculative_accept_threshold_single", 0.9, "changes the output distribution"),
        ("speculative_accept_threshold_acc", 0.9, "changes the output distribution"),
        ("speculative_draft_window_size", 64, "full context"),
        ("context_length", 4096, "Pass --context-length 2048"),
        ("use_ray", True, "Ray"),
        ("speculative_draft_load_format", "pt", "safetensors only"),
        ("speculative_num_draft_tokens", 16, "trained with block size 7"),
        ("speculative_dflash_block_size", 4, "trained with block size 7"),
        ("speculative_draft_model_path", None, "needs --speculative-draft-model-path"),
        ("speculative_draft_model_path", "/nowhere/draft", "holds no config.json"),
    ],
)
def test_refused_flags(arguments, name, value, message):
    setattr(arguments, name, value)
    with pytest.raises(HyperDFlashConfigError, match=message):
        checks.validate_server_args(arguments)


def test_every_refused_flag_is_a_real_sglang_field():
    from sglang.srt.arg_groups.overrides import field_names
    from sglang.srt.server_args import ServerArgs

    assert {name for name, *_ in checks.UNSUPPORTED} <= set(field_names(ServerArgs))


def test_pickled_weights_are_refused(arguments, drafter_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((drafter_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    arguments.speculative_draft_model_path = str(tmp_path)
    with pytest.raises(HyperDFlashConfigError, match="pickled weights are not loaded"):
        checks.validate_server_args(arguments)
