"""What HYPERDFLASH refuses before any model is loaded: flags, variables, checkpoints."""

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
def arguments(target_dir, drafter_dir):
    """Arguments that pass; SGLang itself has already applied the hooks in a real launch."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(target_dir), speculative_draft_model_path=str(drafter_dir), device="cpu"
    )


@pytest.fixture
def drafter(arguments, drafter_dir, tmp_path) -> Path:
    copy = shutil.copytree(drafter_dir, tmp_path / "draft")
    arguments.speculative_draft_model_path = str(copy)
    return copy


def refused(arguments, said: str) -> None:
    with pytest.raises(HyperDFlashConfigError, match=said) as caught:
        checks.validate_server_args(arguments)
    assert len(str(caught.value).splitlines()) == 1


# Flags that no server of ours takes, then values of arguments and variables with what the refusal
# names if it is another one.
FLAGS = """
    enable_lora enable_hisparse enable_unified_memory speculative_adaptive
    use_ray enable_return_hidden_states enable_pdmux smg_grpc_mode
"""
REFUSED = [
    *((name, True, None) for name in FLAGS.split()),
    *((f"speculative_accept_threshold_{name}", 0.9, None) for name in ("single", "acc")),
    *((f"decrypted_{name}_file", "/config.json", None) for name in ("config", "draft_config")),
    *(("HYPERDFLASH_DRAFT_TEMPERATURE", text, None) for text in ("sharp", "1.5", "-0.1", "nan")),
    *(("HYPERDFLASH_COPY", text, None) for text in ("many", "63", "-1", "nan", "inf")),
    ("pp_size", 2, None),
    ("lora_paths", ["a=b"], None),
    ("rl_on_policy_target", "fsdp", None),
    ("speculative_draft_window_size", 64, None),
    ("context_length", 4096, "--context-length 2048"),
    ("return_hidden_states_mode", "last", None),
    ("grammar_backend", "outlines", None),
    ("speculative_draft_load_format", "pt", None),
    ("speculative_num_draft_tokens", 16, None),
    ("speculative_dflash_block_size", 4, None),
    ("json_model_override_args", '{"num_hidden_layers": 4}', None),
    ("speculative_draft_model_path", None, "--speculative-draft-model-path"),
    ("speculative_draft_model_path", "/nowhere/draft", "/nowhere/draft"),
    ("SGLANG_RUST_SERVER", "1", None),
    ("HYPERDFLASH_WIDTH", "8", None),
    ("enable_memory_saver", True, "--enable-draft-weights-cpu-backup"),
]


def test_the_committed_pair_is_accepted(arguments):
    arguments.speculative_num_draft_tokens = 7
    arguments.enable_memory_saver = arguments.enable_draft_weights_cpu_backup = True
    checks.validate_server_args(arguments)


@pytest.mark.parametrize("name, value, said", REFUSED)
def test_refused_flags_and_variables(arguments, monkeypatch, name, value, said):
    if name.isupper():
        monkeypatch.setenv(name, value)
    else:
        assert hasattr(arguments, name)
        setattr(arguments, name, value)
    refused(arguments, said or name)


def test_made_up_acceptance_is_refused_where_answers_must_be_real(arguments, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    checks.validate_server_args(arguments)
    arguments.enable_deterministic_inference = True
    refused(arguments, "SGLANG_SIMULATE_ACC_LEN")


def test_a_drafter_in_its_targets_hub_repository(arguments, drafter_dir, tmp_path, monkeypatch):
    hub_home(tmp_path, drafter_dir.parent, "owner/target")
    use_hub_home(monkeypatch, tmp_path)
    monkeypatch.setattr(checks, "BUNDLED", drafter_dir.name)
    assert Path(checks.bundled_draft("owner/target", None)).resolve().name == drafter_dir.name
    assert checks.bundled_draft("owner/none", None) is None


def test_a_drafter_s_hub_id_is_read_from_the_cache(arguments, drafter_dir, tmp_path, monkeypatch):
    hub_home(tmp_path, drafter_dir, "owner/drafter")
    use_hub_home(monkeypatch, tmp_path)
    arguments.speculative_draft_model_path = "owner/drafter"
    checks.validate_server_args(arguments)
    arguments.speculative_draft_model_path = "owner/gone"
    refused(arguments, "owner/gone")


def test_a_window_is_refused_where_its_slots_would_be_moved(arguments, monkeypatch):
    config = checks.load_draft_config(arguments)
    monkeypatch.setattr(checks, "load_draft_config", lambda _: replace(config, window=64))
    checks.validate_server_args(arguments)
    with monkeypatch.context() as moved:
        moved.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
        refused(arguments, "windowed")


@pytest.mark.parametrize(
    "name, value",
    [
        ("disaggregation_mode", "decode"),
        ("hicache_storage_backend", "file"),
        ("enable_unified_cache_external_linker", True),
    ],
)
def test_a_window_where_others_compute_prompts(arguments, name, value):
    config = checks.load_draft_config(arguments)
    assert checks.served_window(arguments, config) is None
    setattr(arguments, name, value)
    assert checks.served_window(arguments, config) == checks.IMPOSED_WINDOW
    assert checks.served_window(arguments, replace(config, window=64)) == 64
    checks.validate_server_args(arguments)


@pytest.mark.parametrize("target", [FLASH, PRO], ids=["flash", "pro"])
def test_a_block_beyond_v4s_compressor_rings_is_refused(arguments, tmp_path, target):
    """Rings of 16 rows, windows of 8: at most ten rows."""
    arguments.model_path, arguments.load_format = str(target_folder(tmp_path, target)), "dummy"
    for block in (10, 11):
        folder = draft_folder(tmp_path / f"{block}", target, DrafterShape(block_size=block))
        arguments.speculative_draft_model_path = str(folder)
        if block == 10:
            checks.validate_server_args(arguments)
    refused(arguments, "block size 11")


def test_two_batch_overlap_is_refused_where_sglang_has_none(arguments):
    raw = json.loads((Path(arguments.model_path) / "config.json").read_text())
    config = checks.load_draft_config(arguments)
    arguments.enable_two_batch_overlap = True
    checks._check_served_target(arguments, SimpleNamespace(to_dict=lambda: raw), config)
    raw["architectures"] = ["HYV4ForCausalLM"]
    config = replace(config, target=replace(config.target, architecture="HYV4ForCausalLM"))
    with pytest.raises(HyperDFlashConfigError, match="enable_two_batch_overlap"):
        checks._check_served_target(arguments, SimpleNamespace(to_dict=lambda: raw), config)


def test_a_mask_embedding_for_the_target_is_refused(arguments, drafter):
    """SGLang's DFLASH worker would write it into the target's table, with dummy weights too."""
    torch.save({"mask_token_id": 3, "embedding": torch.ones(256)}, drafter / "mask_embedding.pt")
    for arguments.load_format in ("auto", "dummy"):
        refused(arguments, f"{drafter}/mask_embedding.pt")


@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "pickled"])
def test_a_damaged_or_pickled_drafter_is_refused_at_the_start(arguments, drafter, damage):
    weights = drafter / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes({"cut": whole[:-9], "longer": whole + b"x"}.get(damage, b""))
    if damage == "pickled":
        weights.rename(drafter / "pytorch_model.bin")
    refused(arguments, "pickled" if damage == "pickled" else str(weights))
    arguments.load_format = "dummy"
    checks.validate_server_args(arguments)


def test_a_drafter_of_another_target_is_refused_before_it_loads(arguments, target_dir, tmp_path):
    target = shutil.copytree(target_dir, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights[next(name for name in weights if name.endswith("hc_base"))] += 1.0
    save_file(weights, target / "model.safetensors")
    arguments.model_path = str(target)
    refused(arguments, "hc_head")
    (target / "model.safetensors").unlink()
    checks.validate_server_args(arguments)  # SGLang's loader says what is wrong with the target
