"""Parts of the portable core; ``training/test_reducer_source.py`` has its states."""

import pytest
import torch
from transformers import DeepseekV4Config

from sglang_hyperdflash.cpu.portable.core import DeepseekV4Core, check_config
from sglang_hyperdflash.cpu.portable.mhc import sinkhorn
from sglang_hyperdflash.cpu.portable.weights import load_core, sent_in_parts
from sglang_hyperdflash.targets.weight_names import core_name
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.local_target import LocalTarget


def test_cached_steps_equal_one_pass(target_dir):
    target = LocalTarget(target_dir)
    tokens = torch.randint(5, target.config.vocab_size, (2, 40))
    _, whole, _ = target.features(tokens)
    cache, parts, done = target.new_cache(2, 40), [], 0
    for part in tokens.split((1, 7, 12, 1, 19), 1):
        parts.append(target.step(part, torch.full((2,), done), cache)[1])
        done += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-3)


def test_sparse_experts_equal_dense(target_dir):
    target = LocalTarget(target_dir)
    x = torch.randn(9, target.config.hidden_size)
    ids = torch.randint(0, target.config.vocab_size, (9,))
    for layer in target.core.layers:
        routed = x, *layer.mlp.route(x, ids)
        sparse, dense = layer.mlp._sparse(*routed), layer.mlp._dense(*routed)
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 7])
def test_sinkhorn_in_one_loop_is_that_of_operations(rows):
    logits = 4 * torch.randn(rows, 4, 4)
    comb = logits.softmax(-1) + 1e-6
    given = comb.clone()
    expected = sinkhorn(comb.clone().requires_grad_(), 20, 1e-6)
    assert expected.grad_fn is not None
    for result in (sinkhorn(comb, 20, 1e-6), sinkhorn(comb.mT.contiguous().mT, 20, 1e-6)):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(comb, given)
    alone = [sinkhorn(row[None], 20, 1e-6) for row in comb]
    assert all(torch.equal(a[0], b) for a, b in zip(alone, sinkhorn(comb, 20, 1e-6), strict=True))


def test_both_naming_schemes_name_the_same_parameters():
    pairs = {
        "layers.3.attn.wq_a.weight": "model.layers.3.self_attn.q_a_proj.weight",
        "layers.3.attn.q_norm.weight": "model.layers.3.self_attn.q_a_norm.weight",
        "layers.3.attn.attn_sink": "model.layers.3.self_attn.sinks",
        "layers.3.hc_attn_fn": "model.layers.3.attn_hc.fn",
        "layers.3.ffn.gate.bias": "model.layers.3.mlp.gate.e_score_correction_bias",
        "layers.3.ffn_norm.weight": "model.layers.3.post_attention_layernorm.weight",
        "hc_head_fn": "model.hc_head.hc_fn",
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for deepseek, transformers in pairs.items():
        assert core_name(deepseek) == core_name(transformers)


def config_with(**changes) -> DeepseekV4Config:
    sizes = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"qk_rope_head_dim": 8, "q_lora_rank": 8, "o_groups": 1, "o_lora_rank": 8}
    sizes |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64}
    kinds = {"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["moe"] * 2}
    return DeepseekV4Config(**{**sizes, **kinds, **changes})


def test_other_configs_are_refused_by_name():
    changes = {"tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu"}
    changes |= {"num_key_value_heads": 2}
    changes["layer_types"] = ["heavily_compressed_attention", "sliding_attention"]
    for field, value in changes.items():
        with pytest.raises(HyperDFlashConfigError, match=field):
            check_config(config_with(**{field: value}))


def zeroed() -> tuple[DeepseekV4Core, dict[str, torch.Tensor]]:
    """A core whose parameters are zero, and a checkpoint of them."""
    core = DeepseekV4Core(config_with())
    for parameter in core.parameters():
        parameter.data.zero_()
    return core, {name: value.detach().clone() for name, value in core.named_parameters()}


@pytest.mark.parametrize(
    "name, tensor, named",
    [
        ("norm", None, "missing tensors for norm"),
        ("extra", torch.zeros(2), "unexpected tensor extra"),
        ("norm", torch.ones(3), "norm has shape"),
        ("norm", torch.full((32,), float("nan")), "norm holds NaN"),
    ],
)
def test_damaged_target_checkpoints_are_refused(name, tensor, named):
    core, weights = zeroed()
    damaged = weights | {name: tensor}
    with pytest.raises(HyperDFlashConfigError, match=named):
        load_core(core, ((n, t) for n, t in damaged.items() if t is not None))


def test_an_update_may_come_in_parts_and_is_checked_all_the_same():
    core, before = zeroed()
    norm = torch.full_like(before["norm"], 3.0)
    load_core(core, [("norm", norm)], whole=False)
    for name, parameter in core.named_parameters():
        assert torch.equal(parameter, norm if name == "norm" else before[name]), name
    with pytest.raises(HyperDFlashConfigError, match="unexpected tensor extra"):
        load_core(core, [("extra", norm)], whole=False)


def test_a_trainers_tensors_come_as_a_list_and_a_checkpoints_do_not():
    """Otherwise a checkpoint that lacks a shard would be taken into a running server.

    ``tests/unit/test_seams.py`` pins what SGLang gives.
    """
    assert sent_in_parts([("norm", torch.ones(1))])
    assert not sent_in_parts(iter([("norm", torch.ones(1))]))
