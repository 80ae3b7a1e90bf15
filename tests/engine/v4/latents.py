"""Torch forms of DeepSeek-V4's norms, RoPE and fp8 stores (``main_norm_rope.cuh`` and others).

A latent row is 584 bytes: 448 fp8 values in seven groups of 64, 64 bf16 rotated values, seven
power-of-two scales and one byte of padding, which no kernel writes. An index key is 128 fp8 values
and one fp32 scale. A page holds its rows' data first, then their scales.
"""

import scipy.linalg
import torch

NOPE, ROPE, GROUP, FP8_MAX = 448, 64, 64, 448.0
INDEX = 128
# Bytes of a row's data and of its scales, and how many of these are written.
LATENT, KEY = (NOPE + 2 * ROPE, 8, NOPE // GROUP), (INDEX, 4, 4)


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor, positions, inverse=False) -> torch.Tensor:
    """RoPE over neighbouring pairs of ``x [n, ..., 64]``; fp32."""
    freqs = freqs_cis[positions.long()]
    if inverse:
        freqs = freqs.conj()
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    freqs = freqs.view(len(freqs), *[1] * (pairs.dim() - 2), -1)
    return torch.view_as_real(pairs * freqs).flatten(-2)


def rotate_end(x: torch.Tensor, freqs_cis: torch.Tensor, positions) -> torch.Tensor:
    """RoPE of the last 64 channels only; fp32."""
    return torch.cat([x[..., :-ROPE], rotate(x[..., -ROPE:], freqs_cis, positions)], dim=-1)


def rms(x: torch.Tensor, eps: float, weight=None) -> torch.Tensor:
    """RMSNorm of the last dimension; fp32."""
    x = x.float()
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).float()
    return x * scale if weight is None else x * scale * weight.float()


def fused_rope_inplace(q, k, freqs_cis, positions, inverse) -> None:
    for x in (q, k):
        if x is not None:
            x.copy_(rotate(x, freqs_cis, positions, inverse))


def fused_q_norm_rope(q_input, q_output, eps, freqs_cis, positions) -> None:
    q = q_input if eps is None else rms(q_input, eps).to(q_input.dtype)
    d = 2 * freqs_cis.shape[-1]
    q_output[..., :-d] = q[..., :-d]
    q_output[..., -d:] = rotate(q[..., -d:], freqs_cis, positions).to(q_output.dtype)


def page_bytes(loc: torch.Tensor, page: int, data: int, scale: int, written: int):
    """An index of the bytes of slots ``loc`` in ``[pages, bytes]``: of their data, then scales."""
    block, slot = (loc // page)[..., None], (loc % page)[..., None]
    scales = page * data + slot * scale + torch.arange(written)
    return block, torch.cat([slot * data + torch.arange(data), scales], dim=-1)


def _exponent(groups: torch.Tensor) -> torch.Tensor:
    """Biased exponent of the smallest power of two that brings a group within fp8's range."""
    raw = (groups.abs().amax(-1).clamp_min(1e-4) / FP8_MAX).float()
    bits = raw.view(torch.int32)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()


def store_latents(x: torch.Tensor, loc: torch.Tensor, cache: torch.Tensor, page: int) -> None:
    """Write ``x [n, 512]``, normed and rotated, to slots ``loc``; negative slots are skipped."""
    keep = loc >= 0
    x, loc = x[keep].float(), loc[keep].long()
    if not len(loc):
        return
    groups = x[:, :NOPE].reshape(-1, NOPE // GROUP, GROUP)
    exponent = _exponent(groups)
    inverse = torch.exp2(127.0 - exponent.float())
    nope = (groups * inverse[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    rope = x[:, NOPE:].to(torch.bfloat16).contiguous()
    data = (nope.view(torch.uint8).flatten(1), rope.view(torch.uint8), exponent.to(torch.uint8))
    raw = cache.view(torch.uint8).view(cache.shape[0], -1)
    raw[page_bytes(loc, page, *LATENT)] = torch.cat(data, dim=1)


def load_latents(cache: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
    """``[n, 512]`` fp32 of slots of ``cache [pages, page, 1, 584]`` (a view of padded pages)."""
    pages, page = cache.shape[:2]
    raw = cache.view(torch.uint8).as_strided((pages, cache.stride(0)), (cache.stride(0), 1))
    rows = raw[page_bytes(loc, page, *LATENT)].split((NOPE, 2 * ROPE, NOPE // GROUP), dim=1)
    nope, rope, scale = (part.contiguous() for part in rows)
    nope = nope.view(torch.float8_e4m3fn).float().view(-1, NOPE // GROUP, GROUP)
    nope = nope * torch.exp2(scale.float() - 127.0)[..., None]
    rope = rope.flatten().view(torch.bfloat16).float()  # rows of one alone may have any stride
    return torch.cat([nope.view(-1, NOPE), rope.view(-1, ROPE)], dim=1)


def fused_k_norm_rope_flashmla(
    kv, kv_weight, eps, freqs_cis, positions, out_loc, kvcache, page_size, layout, q
) -> None:
    assert q is None and str(getattr(layout, "value", layout)) == "v4"
    assert out_loc.dtype == torch.int32
    x = rotate_end(rms(kv, eps, kv_weight), freqs_cis, positions)
    store_latents(x, out_loc, kvcache, page_size)


HADAMARD = torch.from_numpy(scipy.linalg.hadamard(INDEX, dtype=float)) * INDEX**-0.5


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Hadamard transform of ``x [..., 128]``; fp32."""
    return (x.double() @ HADAMARD).float()


def fp8_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and one fp32 scale for each row of the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def store_index(x: torch.Tensor, loc: torch.Tensor, cache: torch.Tensor, page: int) -> None:
    """Write index keys ``x [n, 128]``, rotated, to slots ``loc``."""
    values, scale = fp8_row(hadamard(x))
    raw = cache.view(torch.uint8).view(cache.shape[0], -1)
    both = (values.view(torch.uint8), scale.contiguous().view(torch.uint8))
    raw[page_bytes(loc, page, *KEY)] = torch.cat(both, dim=1)


def fused_q_indexer_rope_hadamard_quant(q_input, weight, weight_scale, freqs_cis, positions):
    q = rotate_end(q_input.float(), freqs_cis, positions)
    q_fp8, scale = fp8_row(hadamard(q.to(q_input.dtype).float()))
    return q_fp8, weight.float()[..., None] * weight_scale * scale
