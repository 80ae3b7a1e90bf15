"""The draft checkpoint: strict names, shapes and values; config rules; round trips."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from sglang_hyperdflash.draft.checkpoint import checked_tensors, expected_tensors
from sglang_hyperdflash.draft.config import (
    check_fingerprint,
    check_target,
    load_config,
    parse_config,
)
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter


@pytest.fixture(scope="module")
def raw(drafter_dir):
    return json.loads((drafter_dir / "config.json").read_text())


@pytest.fixture(scope="module")
def weights(drafter_dir):
    return load_file(drafter_dir / "model.safetensors")


def changed(raw, path, value):
    """A copy of the config with one field set, or removed when ``value`` is None."""
    config = copy.deepcopy(raw)
    *parents, name = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    if value is None:
        section.pop(name)
    else:
        section[name] = value
    return config


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("architectures", ["DFlashDraftModel"], "must hold a HyperDFlashDraftModel"),
        ("auto_map", {"AutoModel": "x.Y"}, "remote code"),
        ("hyperdflash_config", None, "hyperdflash_config is missing"),
        ("dflash_config.mask_token_id", None, "mask_token_id is missing"),
        ("dflash_config.mask_token_id", 99999, "outside the vocabulary"),
        ("dflash_config.block_size", 16, "both must be the block size"),
        ("block_size", 1, "block_size"),
        ("block_size", "seven", 'block_size must be a valid integer, found "seven"'),
        ("hyperdflash_config.reducer", "mlp", "must be 'hc_gate' or 'fc', found"),
        (
            "hyperdflash_config.source",
            "layer_3",
            "must be 'pre_hc_head' or 'layers', found",
        ),
        ("hyperdflash_config.hc_mult", 0, "hc_mult must be greater than or equal to 1, found 0"),
        ("is_causal", 1, "is_causal must be a valid boolean, found 1"),
        ("hyperdflash_config.gate", None, "hyperdflash_config.gate is missing. Re-export"),
        ("hyperdflash_config.gate", "none", "gate is none, which is for reducer fc"),
        ("hyperdflash_config.window", 6, "window must be at least the block size 7"),
        ("hyperdflash_config.window", "all", "window must be a valid integer, found"),
        ("hyperdflash_config.widow", 64, "hyperdflash_config: unknown field widow; known are"),
        (
            "dflash_config.target_layer_ids",
            [1, -1],
            "target_layer_ids 2 must be greater than .* found -1",
        ),
        ("rms_norm_eps", "small", "rms_norm_eps must be a valid number"),
        ("num_attention_heads", None, "num_attention_heads is missing"),
        ("hyperdflash_config.target.hidden_size", 4096, "differs from"),
        ("hyperdflash_config.target.hc_head_fingerprint", None, "needs a target with an hc_head"),
    ],
)
def test_bad_configs_name_the_field(raw, path, value, message):
    with pytest.raises(HyperDFlashConfigError, match=message):
        parse_config(changed(raw, path, value))


def test_missing_and_broken_config_files(tmp_path):
    with pytest.raises(HyperDFlashConfigError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HyperDFlashConfigError, match="is not JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda w: w.pop("reducer.base"), "missing: reducer.base"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (lambda w: w.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \(3,\)"),
        (
            lambda w: w.update({"reducer.scale": torch.tensor([float("nan")])}),
            "reducer.scale holds NaN",
        ),
        (
            lambda w: w.update({"norm.weight": w["norm.weight"].long()}),
            "norm.weight in fp32, fp16 or bf16, found torch.int64",
        ),
    ],
)
def test_damaged_weights_are_refused(raw, weights, damage, message):
    damaged = dict(weights)
    damage(damaged)
    with pytest.raises(HyperDFlashConfigError, match=message):
        list(checked_tensors(damaged.items(), expected_tensors(raw, parse_config(raw))))


def test_a_repeated_tensor_is_refused(raw, weights):
    twice = [*weights.items(), ("norm.weight", weights["norm.weight"])]
    with pytest.raises(HyperDFlashConfigError, match="appears twice"):
        list(checked_tensors(twice, expected_tensors(raw, parse_config(raw))))


def target_facts(raw, **changes):
    target = raw["hyperdflash_config"]["target"]
    names = ("architecture", "hidden_size", "vocab_size", "num_hidden_layers")
    return {**{n: target[n] for n in names}, "hc_mult": 4, **changes}


def test_the_right_target_is_accepted(raw):
    check_target(parse_config(raw), **target_facts(raw))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hc_mult": None}, "hyper-connection"),
        ({"hc_mult": 2}, "hc_mult=4"),
        ({"hidden_size": 512}, "hidden_size=256"),
        ({"vocab_size": 129280}, "vocab_size=1363"),
        ({"num_hidden_layers": 43}, "num_hidden_layers=8"),
    ],
)
def test_another_target_is_refused(raw, changes, message):
    with pytest.raises(HyperDFlashConfigError, match=message):
        check_target(parse_config(raw), **target_facts(raw, **changes))


def test_fingerprint_is_of_values_not_of_dtype_and_refuses_others(raw):
    config = parse_config(raw)
    head = HcHead(torch.randn(4, 64), torch.randn(4), torch.randn(1))
    assert head.fingerprint() == HcHead(*(t.double() for t in head)).fingerprint()
    with pytest.raises(HyperDFlashConfigError, match="another target"):
        check_fingerprint(config, head.fingerprint())
    with pytest.raises(HyperDFlashConfigError, match="the served target has none"):
        check_fingerprint(config, None)
    check_fingerprint(config, config.target.hc_head_fingerprint)


def test_save_and_load_round_trip(drafter_dir, tmp_path):
    drafter = Drafter.load(drafter_dir)
    drafter.save(tmp_path)
    again = Drafter.load(tmp_path)
    for (name, mine), theirs in zip(
        drafter.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


def test_fc_reducer_has_its_own_tensors(raw):
    config = changed(raw, "hyperdflash_config.reducer", "fc")
    names = expected_tensors(config, parse_config(config))
    assert "fc.weight" in names
    assert not any(name.startswith("reducer.") for name in names)
    drafter = Drafter(config)
    assert drafter.reduce(torch.randn(1, 3, 1024)).shape == (1, 3, 256)
