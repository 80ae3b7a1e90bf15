"""The draft checkpoint: config rules, the target it belongs to, strict tensors, round trips."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

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
from tests.engine.drafters import with_dependency

OWN = "hyperdflash_config"
MISSING = object()
HEAD = f"{OWN}.dependency"
OF_LAYERS = {f"{OWN}.source": "layers", f"{OWN}.reducer": "fc"}


@pytest.fixture(scope="module")
def raw(drafter_dir):
    return json.loads((drafter_dir / "config.json").read_text())


@pytest.fixture(scope="module")
def weights(drafter_dir):
    return load_file(drafter_dir / "model.safetensors")


def changed(raw, changes):
    """A copy of the config with fields set by dotted name, or removed where ``MISSING``."""
    config = copy.deepcopy(raw)
    for path, value in changes.items():
        *parents, name = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        section[name] = value
        if value is MISSING:
            del section[name]
    return config


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architectures": ["DFlashDraftModel"]}, "architectures"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({OWN: MISSING}, OWN),
        ({f"{OWN}.gate": MISSING}, f"{OWN}.gate"),
        ({"num_attention_heads": MISSING}, "num_attention_heads"),
        ({f"{OWN}.widow": 64}, "widow"),
        ({"block_size": "seven"}, 'block_size must be a valid integer, found "seven"'),
        ({"is_causal": 1}, "is_causal"),
        ({"block_size": 1}, "block_size"),
        ({f"{OWN}.hc_mult": 0}, "hc_mult"),
        ({f"{OWN}.reducer": "mlp"}, f"{OWN}.reducer"),
        ({"dflash_config.target_layer_ids": [1, -1]}, "target_layer_ids 2"),
        # Fields that contradict others.
        ({"dflash_config.mask_token_id": 1363}, "mask_token_id"),
        ({"dflash_config.block_size": 16}, "dflash_config.block_size"),
        ({f"{OWN}.window": 6}, f"{OWN}.window"),
        ({f"{OWN}.gate": "none"}, f"{OWN}.gate"),
        ({f"{OWN}.source": "layers"}, "source layers"),
        (OF_LAYERS | {"dflash_config.target_layer_ids": [8]}, "target_layer_ids"),
        ({f"{OWN}.target.hidden_size": 4096}, "target.hidden_size"),
        ({f"{OWN}.target.hc_head_fingerprint": None}, "hc_head_fingerprint"),
        ({HEAD: {"rank": 4, "top_k": 1364}}, "dependency.top_k"),
        ({HEAD: {"rank": 4, "top_k": 4, "form": "sum"}}, "dependency.form"),
        # Without layer_types SGLang ignores is_causal: drafts would not be those of training.
        ({"is_causal": True}, "layer_types"),
        ({"is_causal": True, "layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["other"] * 3}, "layer_types"),
    ],
)
def test_bad_configs_name_the_field(raw, changes, named):
    with pytest.raises(HyperDFlashConfigError, match=re.escape(named)):
        parse_config(changed(raw, changes))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_missing_and_broken_config_files(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(HyperDFlashConfigError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "name, tensor, named",
    [
        ("reducer.base", MISSING, "missing: reducer.base"),
        ("dependency.gate.weight", MISSING, "missing: dependency.gate.weight"),
        ("extra", torch.zeros(1), "unexpected tensor extra"),
        ("norm.weight", torch.ones(3), r"norm.weight has shape \(3,\)"),
        ("dependency.successor", torch.zeros(1363, 7), r"dependency.successor has shape"),
        ("reducer.scale", torch.tensor([float("nan")]), "reducer.scale holds NaN"),
        ("norm.weight", torch.ones(256).long(), "norm.weight .*torch.int64"),
    ],
)
def test_damaged_weights_are_refused(raw, weights, tmp_path, name, tensor, named):
    tensors = weights | {name: tensor}
    damaged = {name: t for name, t in tensors.items() if t is not MISSING}
    save_file(damaged, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HyperDFlashConfigError, match=named):
        Drafter.load(tmp_path)


def test_repeated_tensors_and_those_of_no_config_are_refused(raw, weights):
    twice = [*weights.items(), ("norm.weight", weights["norm.weight"])]
    with pytest.raises(HyperDFlashConfigError, match="twice"):
        list(checked_tensors(twice, expected_tensors(raw, parse_config(raw))))
    headless = changed(raw, {HEAD: MISSING})
    expected = expected_tensors(headless, parse_config(headless))
    with pytest.raises(HyperDFlashConfigError, match=r"unexpected tensor dependency\."):
        list(checked_tensors(weights.items(), expected))


@pytest.mark.parametrize("name", ["hc_mult", "hidden_size", "vocab_size", "num_hidden_layers"])
def test_another_target_is_refused(raw, name):
    facts = raw[OWN]["target"] | {"hc_mult": 4}
    del facts["hc_head_fingerprint"]
    check_target(parse_config(raw), **facts)
    with pytest.raises(HyperDFlashConfigError, match=f"{name}={facts[name]}"):
        check_target(parse_config(raw), **facts | {name: 2})
    with pytest.raises(HyperDFlashConfigError, match="hc_mult"):
        check_target(parse_config(raw), **facts | {"hc_mult": None})


def test_a_fingerprint_is_of_values_not_of_dtype_and_refuses_others(raw):
    config = parse_config(raw)
    gate = HcHead(torch.randn(4, 64), torch.randn(4), torch.randn(1))
    assert gate.fingerprint() == HcHead(*(t.double() for t in gate)).fingerprint()
    check_fingerprint(config, config.target.hc_head_fingerprint)
    for other in (gate.fingerprint(), None):
        with pytest.raises(HyperDFlashConfigError):
            check_fingerprint(config, other)
    # A drafter that inherited nothing belongs to any target of its sizes.
    check_fingerprint(parse_config(changed(raw, {f"{OWN}.reducer": "fc"})), None)


def test_a_new_causal_drafter_is_saved_loaded_and_read_by_sglang(raw, tmp_path):
    """SGLang hands over what transformers made of config.json, with fields of its own."""
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.models.dflash import _get_dflash_layer_attention_params
    from transformers import AutoConfig

    drafter = Drafter(with_dependency(raw, 8, causal=True))
    drafter.save(tmp_path)
    again, config = Drafter.load(tmp_path), load_config(tmp_path)
    assert (config.dependency.rank, config.dependency.top_k, config.causal) == (8, 64, True)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["dependency.gate.weight"].dtype == torch.bfloat16
    loaded = again.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(stored[name].dtype).to(tensor.dtype)), name
    read = AutoConfig.from_pretrained(tmp_path)
    assert parse_config(read.to_dict()) == config
    assert _get_dflash_layer_attention_params(read, 0) == (-1, AttentionType.DECODER)
    read.is_causal = None
    assert _get_dflash_layer_attention_params(read, 0) == (-1, AttentionType.ENCODER_ONLY)
