"""The NextN layer: its form against transformers' own layer, its checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, DeepseekV4ForCausalLM

from eval.rivals.nextn_core import NextNCore, nextn_tensors
from sglang_hyperdflash.cpu.portable.core import rms_norm
from sglang_hyperdflash.cpu.portable.weights import load_core
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


def causal(target, n: int):
    """Attention over one row of ``n`` tokens."""
    return target.new_cache(1, n).attend(torch.zeros(1, dtype=torch.long), n, target.scaling)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(EXAMPLE / "mtp" / "model.safetensors")


@pytest.fixture(scope="module")
def core(weights):
    core = NextNCore(AutoConfig.from_pretrained(EXAMPLE / "mtp")).eval()
    load_core(core, nextn_tensors(weights.items()))
    return core


@torch.no_grad()
def test_the_layer_is_transformers_layer_over_projected_paths(core, weights, target):
    """A one-layer transformers model holds the layer; its streams are set by hand."""
    config = AutoConfig.from_pretrained(EXAMPLE / "mtp")
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


def test_a_checkpoint_with_a_missing_tensor_is_refused(core, weights):
    assert all(name.startswith("mtp.0.") for name in weights)
    fewer = {name: weights[name] for name in weights if name != "mtp.0.e_proj.weight"}
    with pytest.raises(HyperDFlashConfigError, match=r"e_proj\.weight"):
        load_core(core, nextn_tensors(fewer.items()))
