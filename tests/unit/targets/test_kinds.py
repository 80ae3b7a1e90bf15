"""The table of targets, and that a gate which counts as exact is the target's own collapse."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.capture import identity_of
from sglang_hyperdflash.draft.hc_head import HcHead, tensors_fingerprint
from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.targets import kinds
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.targets.final_state import FinalState
from sglang_hyperdflash.targets.kinds import DEEPSEEK_V4, DEEPSEEK_V41, HY_V4, QWEN4_EXP
from sglang_hyperdflash.targets.loaded import EXPOSED
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from tests.transformers_target import TransformersTarget

M, D, VOCAB = 4, 32, 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def hy_v4():
    from transformers import HYV4Config, HYV4ForCausalLM

    dense = {"intermediate_size": 32, "mlp_layer_types": ["dense"] * 2}
    model = HYV4ForCausalLM(HYV4Config(**SIZES, **dense))
    head = model.model.hc_head
    with torch.no_grad():
        head.hc_fn.normal_()
        head.hc_base.normal_()
        head.hc_scale.fill_(0.7)
    return model


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


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target_dir) -> dict[str, Path]:
    """Targets by the kind's name; ``cut``: a V4.1 without its last layer."""
    from transformers import Qwen4ExpConfig

    root = tmp_path_factory.mktemp("targets")
    made = {DEEPSEEK_V4.name: target_dir, HY_V4.name: root / "hy"}
    torch.manual_seed(0)
    hy_v4().save_pretrained(made[HY_V4.name])
    made[DEEPSEEK_V41.name] = deepseek_v41(root / "v41", target_dir)
    made["cut"] = deepseek_v41(root / "cut", target_dir, whole=False)
    made[QWEN4_EXP.name] = root / "qwen"
    qwen = Qwen4ExpConfig(text_config=SIZES, architectures=QWEN4_EXP.architectures[:1])
    qwen.save_pretrained(made[QWEN4_EXP.name])
    return made


def initialise(target: Path, out: Path, *options: str) -> int:
    small = ["--layers", "1", "--heads", "4", "--kv-heads", "2", "--intermediate-size", "32"]
    small += ["--mask-token-id", "4"]
    return main(["init", "--target", str(target), "--out", str(out), *small, *options])


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32 sums in another order; of states scaled to 1."""
    scale = expected.abs().max()
    torch.testing.assert_close(result / scale, expected / scale, rtol=1e-5, atol=1e-6)


def test_every_architecture_has_one_entry():
    for kind in kinds.TARGETS:
        assert kind.exposed != any(name in EXPOSED for name in kind.architectures), kind.name
        for name in kind.architectures:
            assert kinds.target_kind({"architectures": [name]}) is kind
        config = {"architectures": list(kind.architectures[:1])}
        if kind is not QWEN4_EXP:
            assert kinds.check_served_target(config) is kind
            continue
        with pytest.raises(HyperDFlashConfigError, match=kind.name):
            kinds.check_served_target(config)


def test_v41_is_told_from_v4_as_sglang_does():
    v4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    for changes in (
        {"model_type": "deepseek_v41"},
        {"model_type": None, "hc_pre_from_prev_sublayer": True},
        {"architectures": ["DeepseekV41ForCausalLM"]},
        {"model_type": None, "text_config": {"model_type": "deepseek_v41_text"}},
    ):
        assert kinds.target_kind(v4 | changes) is DEEPSEEK_V41, changes
    assert kinds.target_kind(v4 | {"hc_pre_from_prev_sublayer": False}) is DEEPSEEK_V4


@pytest.mark.parametrize(
    "architectures, named",
    [
        (["LlamaForCausalLM"], "LlamaForCausalLM.*DFLASH or EAGLE"),
        # It has residual streams, and hands out only their mean.
        (["Glm5NextForConditionalGeneration"], r"GLM-5\.3-Flash.*averages"),
        ([], "architectures"),
    ],
)
def test_an_unknown_target_is_refused(architectures, named):
    with pytest.raises(HyperDFlashConfigError, match=named):
        kinds.target_kind({"architectures": architectures})


def collapsed(reducer: HCGateReducer, residual: torch.Tensor) -> torch.Tensor:
    """The reducer without its path norm: ``[N, m*d]`` to ``[N, d]``."""
    return HcHead(reducer.fn, reducer.base, reducer.scale).collapse(residual, **reducer.epsilons)


@pytest.mark.parametrize("kind", [DEEPSEEK_V4, HY_V4], ids=lambda kind: kind.name)
def test_the_gate_is_the_collapse_of_the_target_itself(tmp_path, folders, kind):
    """Transformers' own module and SGLang's formula, on residuals of a real forward pass."""
    from sglang.srt.models.deepseek_v4 import hc_head_torch

    folder, seen = str(folders[kind.name]), []
    assert initialise(folder, tmp_path / "draft") == 0
    drafter = Drafter.load(tmp_path / "draft")
    assert drafter.config.gate == "inherited"
    target = TransformersTarget(folder)
    target.text.hc_head.register_forward_hook(lambda *args: seen.append(args[-1]))
    tokens = torch.randint(5, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    final, residual, _ = target.features(tokens)
    flat, reducer = residual.flatten(0, 1), drafter.reducer
    assert_same(collapsed(reducer, flat).view_as(seen[0]), seen[0])
    eps = {"norm_eps": reducer.rms_eps, "hc_eps": reducer.hc_eps}
    paths, gate = flat.unflatten(-1, (M, -1)), (reducer.fn, reducer.scale, reducer.base)
    assert_same(collapsed(reducer, flat), hc_head_torch(paths, *gate, **eps))
    # What the trainer computes itself of a captured residual.
    state = FinalState.of(TargetFiles(folder))(residual)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-4)


# The checkpoint's, SGLang's, transformers' and what transformers writes.
SPELLINGS = {
    "checkpoint": ("hc_head.hc_head_fn", "hc_head.hc_head_base", "hc_head.hc_head_scale"),
    "sglang": ("hc_head.hc_head_fn.weight", "hc_head.hc_head_base", "hc_head.hc_head_scale"),
    "transformers": ("hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale"),
    "saved": tuple(f"hc_pre.hc_head.hc_head_{part}" for part in ("fn", "base", "scale")),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_hy_v4_is_read_in_every_spelling(tmp_path, folders, spelling):
    source, names = folders[HY_V4.name], SPELLINGS[spelling]
    tensors = load_file(source / "model.safetensors")
    gate = [tensors.pop(f"model.{name}") for name in SPELLINGS["saved"]]
    # An MTP layer's collapse is another one.
    tensors |= {f"model.mtp_layers.0.{name}": torch.zeros(1) for name in names}
    tensors |= {f"model.{name}": value for name, value in zip(names, gate, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    read = TargetFiles(str(tmp_path)).hc_head(M, D)
    assert all(torch.equal(a, b) for a, b in zip(read, gate, strict=True))


def test_v41_starts_from_the_last_ffns_gate_and_calls_it_approximate(tmp_path, folders):
    from sglang.kernels.ops.layernorm.mhc import _mhc_pre_torch

    target = folders[DEEPSEEK_V41.name]
    assert initialise(target, tmp_path / "draft", "--gate", "approximate") == 0
    drafter = Drafter.load(tmp_path / "draft")
    assert drafter.config.gate == "approximate" and not drafter.config.reads_hc_head
    weights = load_file(target / "model.safetensors")
    fn, base, scale = (weights[f"layers.7.hc_ffn_{part}"] for part in ("fn", "base", "scale"))
    # The gate itself is SGLang's; what differs is the residual that the target computes it from.
    paths = torch.randn(9, M, fn.shape[1] // M, generator=torch.Generator().manual_seed(3)) * 3
    gated = _mhc_pre_torch(paths, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 1)[2]
    assert_same(collapsed(drafter.reducer, paths.flatten(1)), gated)
    # What a captured residual becomes is by the same gate; there is no hc_head to compare.
    files, norm = TargetFiles(str(target)), weights["norm.weight"]
    identity = identity_of(files, "bfloat16")
    assert identity.hc_head_fingerprint is None and identity.hc_mult == M
    assert identity.norm_fingerprint == tensors_fingerprint(norm)
    expected = F.rms_norm(gated.float(), norm.shape, norm, 1e-6)
    assert_same(FinalState.of(files)(paths.flatten(1)), expected)


def test_qwen4_exp_s_nested_fields_are_read_and_it_starts_with_a_projection(tmp_path, folders):
    folder, name = str(folders[QWEN4_EXP.name]), QWEN4_EXP.architectures[0]
    facts = TargetFacts.from_config(TargetFiles(folder).config())
    assert facts == TargetFacts(name, D, VOCAB, 2, M, 0.0, facts.rms_norm_eps, 128)
    config = {"architectures": [name], "text_config": {"hidden_size": D}}
    with pytest.raises(HyperDFlashConfigError, match=r"hc_mult.*\(hc_count\)"):
        TargetFacts.from_config(config)
    with pytest.raises(HyperDFlashConfigError, match="gate per residual"):
        identity_of(TargetFiles(folder), "bfloat16")
    assert initialise(folder, tmp_path / "draft", "--reducer", "fc") == 0
    assert Drafter.load(tmp_path / "draft").fc.weight.shape == (D, M * D)


@pytest.mark.parametrize(
    "target, options, named",
    [
        (DEEPSEEK_V4.name, "--gate approximate", "--gate"),
        (DEEPSEEK_V4.name, "--layer-ids 1 2 --reducer hc_gate", "use reducer fc"),
        (DEEPSEEK_V4.name, "--layer-ids 1 9", "target_layer_ids"),
        (HY_V4.name, "--gate approximate", "--gate"),
        (DEEPSEEK_V4.name, "--gate approximate --reducer fc", "--reducer hc_gate"),
        (DEEPSEEK_V41.name, "", "--gate approximate"),
        ("cut", "--gate approximate", "layers.7.hc_ffn_fn"),
        (QWEN4_EXP.name, "", "--reducer fc"),
        (QWEN4_EXP.name, "--gate approximate", "--reducer fc"),
    ],
)
def test_starts_of_other_targets_are_refused(tmp_path, folders, target, options, named, capsys):
    assert initialise(folders[target], tmp_path / "draft", *options.split()) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()
