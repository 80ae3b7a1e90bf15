"""Torch forms of DeepSeek-V4's hyper-connections (TileLang) and of its routed experts."""

import torch
import torch.nn.functional as F

from tests.engine.v4.latents import rms


def mhc_pre(
    residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
    sinkhorn_repeat, norm_weight, norm_eps,
):  # fmt: skip
    """Mixing weights and the collapsed, normed input of a sublayer."""
    from sglang.kernels.ops.layernorm.mhc import _mhc_pre_torch

    eps = (rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    post, comb, y = _mhc_pre_torch(
        residual, fn, hc_scale, hc_base, *eps, hc_post_mult_value, sinkhorn_repeat
    )
    if norm_weight is not None:
        y = rms(y, norm_eps, norm_weight).to(residual.dtype)
    return post, comb, y


def mhc_post(x, residual, post_layer_mix, comb_res_mix):
    """The streams after a sublayer."""
    from sglang.kernels.ops.layernorm.mhc import _mhc_post_torch

    if post_layer_mix.dim() == 2:
        post_layer_mix = post_layer_mix.unsqueeze(-1)
    return _mhc_post_torch(x.float(), residual.float(), post_layer_mix, comb_res_mix).to(x.dtype)


def mhc_fused_post_pre(
    x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps,
    hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps,
):  # fmt: skip
    """Both in one kernel."""
    streams = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    eps = (rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    given = (fn, hc_scale, hc_base, *eps, hc_post_mult_value, sinkhorn_repeat)
    return streams, *mhc_pre(streams, *given, norm_weight, norm_eps)


def silu_and_mul_clamp(input, output, swiglu_limit) -> None:
    """The shared expert's activation, both branches clamped."""
    gate, up = input.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    output.copy_(F.silu(gate) * up)


def experts_forward(self, layer, dispatch_output):
    """Unquantised routed experts, one at a time; ids of -1 are padding.

    Not scaled: where the model class is not on CUDA it multiplies by ``routed_scaling_factor``
    itself. Seam: ``UnquantizedFusedMoEMethod.forward_native``.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    weights, ids = topk.topk_weights.float(), topk.topk_ids.long()
    out = torch.zeros_like(x, dtype=torch.float64)
    limit = getattr(self.moe_runner_config, "swiglu_limit", None)
    for e in range(layer.w13_weight.shape[0]):
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        if not len(token):
            continue
        gate, up = F.linear(x[token], layer.w13_weight[e]).chunk(2, dim=-1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = F.linear(F.silu(gate.float()).to(x.dtype) * up, layer.w2_weight[e])
        out.index_add_(0, token, y.double() * weights[token, slot, None].double())
    return StandardCombineInput(hidden_states=out.to(x.dtype))
