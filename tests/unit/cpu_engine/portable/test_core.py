"""The portable DeepSeek-V4 core against transformers' own class on the same checkpoint, fp32."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from cpu_engine.portable.core import DeepseekV4Core, check_config
from cpu_engine.portable.mhc import sinkhorn
from cpu_engine.portable.weights import load_core, sent_in_parts
from sglang_hyperdflash.targets.weight_names import core_name
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.local_target import LocalTarget

TOLERANCE = 1e-4


def golden(folder, tokens):
    """Logits, every layer's streams and the pre-collapse residual of transformers' class."""
    model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    streams, residual = [], []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: streams.append(output[0]))
    model.model.hc_head.register_forward_pre_hook(lambda module, args: residual.append(args[0][0]))
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits, streams, residual[0].flatten(1)


@pytest.mark.parametrize("length", [1, 2, 61, 300])
def test_logits_streams_and_residual_equal_transformers(target_dir, length):
    target = LocalTarget(target_dir)
    tokens = torch.randint(5, target.config.vocab_size, (length,))
    logits, streams, residual = golden(target_dir, tokens)
    attend = target.new_cache(1, length).attend(torch.zeros(1, dtype=torch.long), length, 64**-0.5)
    trace: list[torch.Tensor] = []
    with torch.no_grad():
        hidden, found = target.core(
            target.embed_tokens(tokens), tokens, torch.arange(length), attend, trace
        )
        mine = target.lm_head(hidden)
    assert (mine - logits).abs().max() < TOLERANCE
    assert len(trace) == len(streams)
    for mine, theirs in zip([*trace, found], [*streams, residual], strict=True):
        # The residual grows to hundreds: relative to its size, not to one.
        assert (mine - theirs).abs().max() < TOLERANCE * max(1.0, float(theirs.abs().max()))


def test_cached_steps_equal_one_pass(target_dir):
    target = LocalTarget(target_dir)
    tokens = torch.randint(5, target.config.vocab_size, (2, 40))
    _, whole, _ = target.features(tokens)
    cache = target.new_cache(2, 40)
    parts, at = [], 0
    for n in (1, 7, 12, 1, 19):
        lengths = torch.full((2,), at)
        parts.append(target.step(tokens[:, at : at + n], lengths, cache)[1])
        at += n
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-3)


def test_sparse_experts_equal_dense(target_dir):
    target = LocalTarget(target_dir)
    x = torch.randn(9, target.config.hidden_size)
    ids = torch.randint(0, target.config.vocab_size, (9,))
    for layer in target.core.layers:
        indices, weights = layer.mlp.route(x, ids)
        torch.testing.assert_close(
            layer.mlp._sparse(x, indices, weights),
            layer.mlp._dense(x, indices, weights),
            rtol=1e-4,
            atol=1e-5,
        )


def test_hash_layers_route_by_token_id_alone(target_dir):
    target = LocalTarget(target_dir)
    mlp = target.core.layers[0].mlp
    assert mlp.is_hash
    ids = torch.tensor([7, 7, 8])
    indices, _ = mlp.route(torch.randn(3, target.config.hidden_size), ids)
    assert indices.tolist() == mlp.tid2eid[ids].tolist()


def test_sinkhorn_is_doubly_stochastic():
    comb = sinkhorn(torch.rand(50, 4, 4) + 0.1, 20, 1e-6)
    torch.testing.assert_close(comb.sum(-1), torch.ones(50, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(-2), torch.ones(50, 4), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_sinkhorn_in_one_loop_is_that_of_operations(rows):
    logits = 4 * torch.randn(rows, 4, 4)
    comb = logits.softmax(-1) + 1e-6
    given = comb.clone()
    expected = sinkhorn(comb.clone().requires_grad_(), 20, 1e-6)
    assert expected.grad_fn is not None
    for found in (sinkhorn(comb, 20, 1e-6), sinkhorn(comb.mT.contiguous().mT, 20, 1e-6)):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)
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
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 8,
        "o_groups": 1,
        "o_lora_rank": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["moe"] * 2,
        "max_position_embeddings": 64,
    }
    return DeepseekV4Config(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"layer_types": ["heavily_compressed_attention", "sliding_attention"]}, "layer_types"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_other_configs_are_refused_by_name(changes, field):
    with pytest.raises(HyperDFlashConfigError, match=field):
        check_config(config_with(**changes))


def named(core):
    return {name: parameter.detach().clone() for name, parameter in core.named_parameters()}


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda w: w.pop("norm"), "missing tensors for norm"),
        (lambda w: w.update(extra=torch.zeros(2)), "unexpected tensor extra"),
        (lambda w: w.update(norm=torch.ones(3)), r"norm has shape \(3,\)"),
        (lambda w: w["norm"].fill_(float("nan")), "norm holds NaN"),
    ],
)
def test_damaged_target_checkpoints_are_refused(damage, message):
    core = DeepseekV4Core(config_with())
    weights = named(core)
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor.zero_()
    damage(weights)
    with pytest.raises(HyperDFlashConfigError, match=message):
        load_core(core, weights.items())


def test_a_trainer_s_tensors_come_as_a_list_and_a_checkpoint_s_do_not():
    """Found as: a checkpoint that lacked a shard was taken into a running server."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    updated = inspect.getsource(WeightUpdater.update_weights_from_tensor)
    assert "named_tensors = [" in updated and "load_weights(named_tensors)" in updated
    loaded = inspect.getsource(DefaultModelLoader._get_weights_iterator)
    assert "return ((source.prefix + name, tensor) for (name, tensor) in" in loaded
    assert sent_in_parts([("norm", torch.ones(1))])
    assert not sent_in_parts((name, tensor) for name, tensor in [("norm", torch.ones(1))])


def test_an_update_may_come_in_parts_and_is_checked_all_the_same():
    core = DeepseekV4Core(config_with())
    for parameter in core.parameters():  # memory as it was found
        parameter.data.zero_()
    before = named(core)
    norm = torch.full_like(before["norm"], 3.0)
    load_core(core, [("norm", norm)], whole=False)
    after = named(core)
    assert torch.equal(after.pop("norm"), norm) and not torch.equal(before.pop("norm"), norm)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(HyperDFlashConfigError, match="unexpected tensor extra"):
        load_core(core, [("extra", norm)], whole=False)
