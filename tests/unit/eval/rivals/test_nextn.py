"""The NextN layer: its form against transformers' own layer, its checkpoint, its training."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, DeepseekV4ForCausalLM

from eval.rivals.nextn_core import NextNCore, nextn_tensors
from examples.tiny_deepseek_v4.train_mtp import losses, new_layer, save, train
from sglang_hyperdflash.cpu.portable.core import rms_norm
from sglang_hyperdflash.cpu.portable.weights import load_core
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import FeatureCache
from tests.unit.training.conftest import answers


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


def causal(target, n: int):
    """Attention over one row of ``n`` tokens."""
    return target.new_cache(1, n).attend(torch.zeros(1, dtype=torch.long), n, target.scaling)


@pytest.fixture
def core(target, target_dir, tmp_path):
    core = new_layer(target, target_dir, tmp_path / "mtp")
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from copies and ones
        for parameter in core.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=g)
                parameter.copy_(parameter.bfloat16().float())
    return core


@pytest.fixture(scope="module")
def cache(target):
    return FeatureCache(target, answers(20, 33, 41), dtype=torch.float32)


@torch.no_grad()
def test_the_layer_is_transformers_layer_over_projected_paths(core, target, tmp_path):
    """A one-layer transformers model holds the saved layer; its streams are set by hand."""
    save(core, tmp_path / "mtp")
    weights = load_file(tmp_path / "mtp" / "model.safetensors")
    config = AutoConfig.from_pretrained(tmp_path / "mtp")
    config.num_nextn_predict_layers = 0
    theirs = DeepseekV4ForCausalLM(config).float().eval()
    names = {f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "base", "scale")}
    names["norm.weight"] = "norm.weight"
    places = theirs.model.state_dict()
    for name, tensor in weights.items():
        name = name.removeprefix("mtp.0.")
        if not name.startswith(("e_proj", "h_proj", "enorm", "hnorm")):
            places[names.get(name, f"layers.0.{name}")].copy_(tensor.float())
    g = torch.Generator().manual_seed(1)
    n, d, m = 12, config.hidden_size, config.hc_mult
    ids = torch.randint(10, 1300, (n,), generator=g)
    embeddings, residual = target.embed_tokens(ids), 5 * torch.randn(n, m * d, generator=g)
    state, streams = core(embeddings, residual, ids, torch.arange(n), causal(target, n))
    eps = config.rms_norm_eps
    e = rms_norm(embeddings, core.enorm, eps) @ core.e_proj.weight.T
    paths = rms_norm(residual.view(n, m, d), core.hnorm, eps) @ core.h_proj.weight.T
    given = (paths + e.unsqueeze(1)).unsqueeze(0)
    theirs.model.layers[0].register_forward_pre_hook(lambda _module, args: (given, *args[1:]))
    seen = []
    theirs.model.hc_head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    expected = theirs.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    assert (streams - seen[0][0].flatten(1)).abs().max() < 1e-3 * streams.abs().max()
    torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-3)


def test_the_checkpoint_is_read_back_and_checked(core, tmp_path):
    save(core, tmp_path / "mtp")
    weights = load_file(tmp_path / "mtp" / "model.safetensors")
    assert all(name.startswith("mtp.0.") for name in weights)
    again = NextNCore(AutoConfig.from_pretrained(tmp_path / "mtp"))
    load_core(again, nextn_tensors(weights.items()))
    for name, tensor in core.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-2, atol=1e-2)
    weights.pop("mtp.0.e_proj.weight")
    with pytest.raises(HyperDFlashConfigError, match=r"e_proj\.weight"):
        load_core(again, nextn_tensors(weights.items()))


def test_training_learns(target, target_dir, cache, tmp_path):
    torch.manual_seed(0)
    core = new_layer(target, target_dir, tmp_path / "mtp")
    values = list(train(core, target, cache, steps=10, batch=3))
    assert len(values) == 10 and values[-1] < 0.95 * values[0]


def test_rows_are_aligned_as_the_server_aligns_them(target, cache, tmp_path, target_dir):
    """Row p: the residual of p, the token at p+1, the label at p+2, the teacher's state at p+1."""
    core = new_layer(target, target_dir, tmp_path / "mtp")
    sample, states = cache.samples[0], cache.states([0])
    tokens, n = torch.tensor(sample.tokens), len(sample.tokens) - 1
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, _ = core(
            target.embed_tokens(tokens[1:]),
            states.residual[0, :-1],
            tokens[1:],
            torch.arange(n),
            causal(target, n),
        )
    p = torch.arange(sample.spans[0][0] - 2, n - 1)
    q = target.lm_head(hidden[p].float()).log_softmax(-1)
    teacher = target.lm_head(target.final(states.residual[0, p + 1])).log_softmax(-1)
    ce = F.nll_loss(q, tokens[p + 2])
    kl = F.kl_div(q, teacher, reduction="batchmean", log_target=True)
    loss, _ = losses(core, target, cache, [0])
    torch.testing.assert_close(loss, ce + 0.15 * kl, rtol=2e-3, atol=0)
