"""The table of targets, and that a gate which counts as exact is the target's own collapse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.capture import identity_of
from sglang_hyperdflash.draft.config import check_fingerprint, load_config
from sglang_hyperdflash.draft.hc_head import HcHead, tensors_fingerprint
from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.targets.final_state import FinalState
from sglang_hyperdflash.targets.kinds import (
    DEEPSEEK_V4,
    DEEPSEEK_V41,
    HY_V4,
    QWEN4_EXP,
    TARGETS,
    check_served_target,
    target_kind,
)
from sglang_hyperdflash.targets.loaded import EXPOSED
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from tests.transformers_target import TransformersTarget

# fp32 sums in another order; of states scaled to 1.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
M, D, VOCAB = 4, 32, 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MLA = {
    "intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": D,
}


def hy_v4():
    from transformers import HYV4Config, HYV4ForCausalLM

    model = HYV4ForCausalLM(HYV4Config(**SIZES, **MLA, qk_rope_head_dim=8))
    head = model.model.hc_head
    with torch.no_grad():
        head.hc_fn.normal_()
        head.hc_base.normal_()
        head.hc_scale.fill_(0.7)
    return model


def qwen4_exp():
    from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

    own = {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "hc_lowrank": 8,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    }
    config = Qwen4ExpConfig(text_config={**SIZES, **own}, vision_config=VISION)
    return Qwen4ExpForConditionalGeneration(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target_dir) -> dict[str, Path]:
    """Folder of every target that transformers can make, by the kind's name."""
    found = {DEEPSEEK_V4.name: target_dir}
    for kind, make in ((HY_V4, hy_v4), (QWEN4_EXP, qwen4_exp)):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("targets") / "target"
        make().save_pretrained(folder)
        found[kind.name] = folder
    return found


def deepseek_v41(folder: Path, target_dir: Path, *, whole: bool = True) -> Path:
    """A V4.1 checkpoint's config and gates, under DeepSeek's names (transformers has no class)."""
    folder.mkdir()
    raw = json.loads((target_dir / "config.json").read_text())
    text = {name: raw.pop(name) for name in ("hidden_size", "hc_mult", "hc_eps", "rms_norm_eps")}
    raw |= {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v41"}
    (folder / "config.json").write_text(json.dumps({**raw, "text_config": text}))
    m, d, last = text["hc_mult"], text["hidden_size"], raw["num_hidden_layers"] - 1
    size, g = (2 + m) * m, torch.Generator().manual_seed(1)
    tensors = {}
    for layer in (0, last) if whole else (0,):
        for part, shape in (("fn", (size, m * d)), ("base", (size,)), ("scale", (3,))):
            tensors[f"layers.{layer}.hc_ffn_{part}"] = torch.randn(shape, generator=g)
    tensors["norm.weight"] = torch.rand(d, generator=g)
    save_file(tensors, folder / "model.safetensors")
    return folder


def initialise(target: Path, out: Path, *options: str) -> int:
    small = ["--layers", "1", "--heads", "4", "--kv-heads", "2", "--intermediate-size", "32"]
    small += ["--mask-token-id", "4"]
    return main(["init", "--target", str(target), "--out", str(out), *small, *options])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, **ROUNDING)


# The table.


def test_every_architecture_has_one_entry():
    names = [name for kind in TARGETS for name in kind.architectures]
    assert len(names) == len(set(names))
    for kind in TARGETS:
        assert bool(kind.tensors) == (kind.gate_start in ("exact", "approximate")), kind.name
        by_a_hook = [name for name in kind.architectures if name in EXPOSED]
        assert kind.exposed != bool(by_a_hook), kind.name
        for name in kind.architectures:
            assert target_kind({"architectures": [name]}) is kind


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v41"},
        {"architectures": ["DeepseekV4ForCausalLM"], "hc_pre_from_prev_sublayer": True},
        {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v4"},
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "text_config": {"model_type": "deepseek_v41_text"},
        },
    ],
)
def test_v41_is_told_from_v4_as_sglang_does(config):
    assert target_kind(config) is DEEPSEEK_V41
    plain = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    assert target_kind(plain | {"hc_pre_from_prev_sublayer": False}) is DEEPSEEK_V4


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"supported are DeepseekV4.*names LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "Use DFLASH or EAGLE"),
        # Found as: a model with four residual streams was told that it needs them.
        (
            {"architectures": ["Glm5NextForConditionalGeneration"]},
            r"GLM-5\.3-Flash.*averages.*Use DFLASH or EAGLE",
        ),
        ({"architectures": []}, "lacks architectures"),
    ],
)
def test_an_unknown_target_is_refused(config, message):
    with pytest.raises(HyperDFlashConfigError, match=message):
        target_kind(config)


def test_only_targets_that_hand_out_their_residual_are_served():
    for kind in TARGETS:
        config = {"architectures": list(kind.architectures[:1])}
        if kind is not QWEN4_EXP:
            assert check_served_target(config) is kind
            continue
        with pytest.raises(HyperDFlashConfigError, match=f"cannot serve {kind.name} .* yet: "):
            check_served_target(config)


def test_nested_and_renamed_fields_are_read(folders):
    facts = TargetFacts.from_config(TargetFiles(str(folders[QWEN4_EXP.name])).config())
    assert facts == TargetFacts(
        QWEN4_EXP.architectures[0], D, VOCAB, 2, M, 0.0, facts.rms_norm_eps, 128
    )
    config = {"architectures": QWEN4_EXP.architectures, "text_config": {"hidden_size": D}}
    with pytest.raises(HyperDFlashConfigError, match=r"lacks .*hc_mult.*\(hc_count\)"):
        TargetFacts.from_config(config)


def collapse_of(reducer: HCGateReducer) -> Callable[[torch.Tensor], torch.Tensor]:
    """The reducer without its path norm, a map of ``[N, m*d]`` to ``[N, d]``."""
    gate = HcHead(reducer.fn, reducer.base, reducer.scale)
    return lambda residual: gate.collapse(residual, **reducer.epsilons)


# Exact starts: the reducer without its path norm is the target's own collapse.


@pytest.mark.parametrize("kind", [DEEPSEEK_V4, HY_V4], ids=lambda kind: kind.name)
def test_the_gate_is_the_collapse_of_the_target_itself(tmp_path, folders, kind, capsys):
    """Against transformers' own module, on the residuals of a real forward pass."""
    assert initialise(folders[kind.name], tmp_path / "draft") == 0
    out = capsys.readouterr().out
    assert "exactly" in out and f"({kind.name})" in out
    assert ("serving not yet" in out) == (kind.not_served is not None)
    target = TransformersTarget(str(folders[kind.name]))
    collapsed = []
    target.text.hc_head.register_forward_hook(lambda *args: collapsed.append(args[-1]))
    tokens = torch.randint(5, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    final, residual, _ = target.features(tokens)
    drafter = Drafter.load(tmp_path / "draft")
    assert drafter.config.gate == "inherited"
    found = collapse_of(drafter.reducer)(residual.flatten(0, 1)).view_as(collapsed[0])
    assert_same(found, collapsed[0])
    torch.testing.assert_close(target.text.norm(found), final, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DEEPSEEK_V4, HY_V4], ids=lambda kind: kind.name)
def test_a_captured_residual_becomes_the_final_state(folders, kind):
    """What the trainer computes itself, against transformers' own forward pass."""
    files = TargetFiles(str(folders[kind.name]))
    target = TransformersTarget(str(folders[kind.name]))
    final, residual, _ = target.features(torch.arange(5, 14)[None])
    found = FinalState.of(files)(residual)
    torch.testing.assert_close(found, final, rtol=1e-4, atol=1e-4)


def test_v41_s_final_state_is_by_its_lagged_gate(tmp_path, folders, target_dir):
    """Found as: V4.1 could not be captured, because the state of its LM head was stored."""
    from sglang.kernels.ops.layernorm.mhc import _mhc_pre_torch

    files = TargetFiles(str(deepseek_v41(tmp_path / "target", target_dir)))
    identity = identity_of(files, "bfloat16")
    assert identity.hc_head_fingerprint is None and identity.hc_mult == 4
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    norm = tensors["norm.weight"]
    assert identity.norm_fingerprint == tensors_fingerprint(norm)
    fn, base, scale = (tensors[f"layers.7.hc_ffn_{p}"] for p in ("fn", "base", "scale"))
    paths = torch.randn(9, 4, len(norm), generator=torch.Generator().manual_seed(2)) * 3
    gated = _mhc_pre_torch(paths, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 1)[2]
    expected = F.rms_norm(gated.float(), norm.shape, norm, 1e-6)
    assert_same(FinalState.of(files)(paths.flatten(1)), expected)
    with pytest.raises(HyperDFlashConfigError, match=r"Qwen3.*expected a gate per residual"):
        identity_of(TargetFiles(str(folders[QWEN4_EXP.name])), "bfloat16")


@pytest.mark.parametrize("spelling", ["checkpoint", "sglang", "transformers", "saved"])
def test_hy_v4_is_read_in_every_spelling(tmp_path, folders, spelling):
    source = folders[HY_V4.name]
    tensors = load_file(source / "model.safetensors")
    gate = [tensors.pop(f"model.hc_pre.hc_head.hc_head_{p}") for p in ("fn", "base", "scale")]
    names = {
        "checkpoint": ("hc_head.hc_head_fn", "hc_head.hc_head_base", "hc_head.hc_head_scale"),
        "sglang": ("hc_head.hc_head_fn.weight", "hc_head.hc_head_base", "hc_head.hc_head_scale"),
        "transformers": ("hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale"),
        "saved": tuple(f"hc_pre.hc_head.hc_head_{part}" for part in ("fn", "base", "scale")),
    }[spelling]
    # An MTP layer's collapse is another one.
    tensors |= {f"model.mtp_layers.0.{name}": torch.zeros(1) for name in names}
    tensors |= {f"model.{name}": value for name, value in zip(names, gate, strict=True)}
    (tmp_path / "target").mkdir()
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    (tmp_path / "target" / "config.json").write_bytes((source / "config.json").read_bytes())
    found = TargetFiles(str(tmp_path / "target")).hc_head(M, D)
    assert all(torch.equal(a, b) for a, b in zip(found, gate, strict=True))


def test_the_formulas_are_sglangs(tmp_path, folders):
    """Against SGLang's own torch code of each collapse."""
    from sglang.srt.models.deepseek_v4 import hc_head_torch
    from sglang.srt.models.hunyuan_v4 import HYV4HCHeadLayer

    for kind in (DEEPSEEK_V4, HY_V4):
        folder = tmp_path / kind.name
        assert initialise(folders[kind.name], folder) == 0
        reducer = Drafter.load(folder).reducer
        fn, base, scale = reducer.fn, reducer.base, reducer.scale
        flat = torch.randn(9, fn.shape[1], generator=torch.Generator().manual_seed(2)) * 3
        paths, eps = flat.unflatten(-1, (M, -1)), reducer.epsilons
        if kind is DEEPSEEK_V4:
            names = {"norm_eps": eps["rms_eps"], "hc_eps": eps["hc_eps"]}
            expected = hc_head_torch(paths, fn, scale, base, **names)
        else:
            layer = SimpleNamespace(
                config=SimpleNamespace(rms_norm_eps=eps["rms_eps"], hc_eps=eps["hc_eps"]),
                hc_head_fn=lambda x, fn=fn: (F.linear(x, fn), None),
                hc_head_scale=scale,
                hc_head_base=base,
                _fused_ihc_head_disabled=True,
            )
            expected = HYV4HCHeadLayer.forward(layer, paths)
        assert_same(collapse_of(reducer)(flat), expected)


def test_an_inherited_gate_belongs_to_one_target(tmp_path, folders):
    other = HcHead(torch.zeros(1), torch.zeros(1), torch.zeros(1)).fingerprint()
    assert initialise(folders[HY_V4.name], tmp_path / "fc", "--reducer", "fc") == 0
    check_fingerprint(load_config(tmp_path / "fc"), other)
    assert initialise(folders[HY_V4.name], tmp_path / "hy") == 0
    with pytest.raises(HyperDFlashConfigError, match="another target"):
        check_fingerprint(load_config(tmp_path / "hy"), other)


# Starts that are not exact.


def test_v41_starts_only_by_an_explicit_choice(tmp_path, target_dir, capsys):
    target = deepseek_v41(tmp_path / "target", target_dir)
    assert initialise(target, tmp_path / "draft") == 2
    error = capsys.readouterr().err
    assert "Choose --gate approximate" in error and "or --reducer fc" in error
    assert not (tmp_path / "draft").exists()
    assert initialise(target, tmp_path / "fc", "--reducer", "fc") == 0
    assert "nothing is inherited" in capsys.readouterr().out


def test_v41_takes_the_last_ffns_gate_and_calls_it_approximate(tmp_path, target_dir, capsys):
    from sglang.kernels.ops.layernorm.mhc import _mhc_pre_torch

    target = deepseek_v41(tmp_path / "target", target_dir)
    assert initialise(target, tmp_path / "draft", "--gate", "approximate") == 0
    out = capsys.readouterr().out
    assert "APPROXIMATE" in out and "not its collapse" in out and "exactly" not in out
    drafter = Drafter.load(tmp_path / "draft")
    assert drafter.config.gate == "approximate" and not drafter.config.reads_hc_head
    weights = load_file(target / "model.safetensors")
    fn, base, scale = (weights[f"layers.7.hc_ffn_{part}"] for part in ("fn", "base", "scale"))
    assert torch.equal(drafter.reducer.fn, fn[:M])
    assert torch.equal(drafter.reducer.base, base[:M])
    assert torch.equal(drafter.reducer.scale, scale[:1])
    # The gate itself is SGLang's; what differs is the residual that the target computes it from.
    g = torch.Generator().manual_seed(3)
    before, after = torch.randn(2, 9, M, fn.shape[1] // M, generator=g)
    gated = _mhc_pre_torch(after, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 1)[2]
    found = collapse_of(drafter.reducer)(after.flatten(1))
    assert_same(found, gated)
    lagged = torch.sigmoid(
        F.rms_norm(before.flatten(1), (fn.shape[1],), eps=1e-6) @ fn[:M].T * scale[0] + base[:M]
    )
    assert (found - (lagged.unsqueeze(-1) * after).sum(1)).abs().max() > 0.1


def test_v41_without_the_rows_says_which(tmp_path, target_dir, capsys):
    target = deepseek_v41(tmp_path / "target", target_dir, whole=False)
    assert initialise(target, tmp_path / "draft", "--gate", "approximate") == 2
    error = capsys.readouterr().err
    assert "no tensor layers.7.hc_ffn_fn" in error and "Use --reducer fc" in error


def test_qwen4_exp_needs_fc(tmp_path, folders, capsys):
    target = folders[QWEN4_EXP.name]
    for options in ((), ("--gate", "approximate")):
        assert initialise(target, tmp_path / "draft", *options) == 2
        error = capsys.readouterr().err
        assert "element-wise" in error and "Use --reducer fc" in error
    assert initialise(target, tmp_path / "draft", "--reducer", "fc") == 0
    drafter = Drafter.load(tmp_path / "draft")
    assert drafter.fc.weight.shape == (D, M * D)
    target = TransformersTarget(str(target))
    final, residual, layers = target.features(torch.randint(5, VOCAB, (2, 9)), (0, 1))
    assert drafter.reduce(residual).shape == final.shape == (2, 9, D)
    torch.testing.assert_close(layers[..., D:], residual.unflatten(-1, (M, D)).mean(-2))


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (DEEPSEEK_V4, ("--gate", "approximate"), "Drop --gate"),
        (HY_V4, ("--gate", "approximate"), "Drop --gate"),
        (DEEPSEEK_V4, ("--gate", "approximate", "--reducer", "fc"), "needs --reducer hc_gate"),
    ],
)
def test_choices_that_do_not_fit_are_refused(tmp_path, folders, kind, options, message, capsys):
    assert initialise(folders[kind.name], tmp_path / "draft", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_an_unknown_architecture_gets_no_drafter(tmp_path, target_dir, capsys):
    raw = json.loads((target_dir / "config.json").read_text())
    (tmp_path / "target").mkdir()
    config = raw | {"architectures": ["OtherForCausalLM"]}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    assert initialise(tmp_path / "target", tmp_path / "draft") == 2
    assert "names OtherForCausalLM. Use DFLASH or EAGLE" in capsys.readouterr().err
