"""Torch forms of DeepSeek-V4's sparse attention: FlashMLA, index scores, top-k, metadata."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.engine.v4.latents import INDEX, load_latents


def get_mla_metadata() -> tuple[SimpleNamespace, None]:
    """FlashMLA fills it when it is first called; torch has no schedule."""
    return SimpleNamespace(), None


def flash_mla_with_kvcache(
    q, k_cache, head_dim_v, softmax_scale, indices, topk_length, attn_sink,
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length,
):  # fmt: skip
    """Each query reads ``topk_length`` of its ``indices`` (-1: none) of both caches, and a sink.

    Keys are values.
    """
    assert indices.dtype == torch.int32 and q.shape[1] == 1
    caches = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None:
        caches.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    # Neighbouring rows read nearly the same keys, so each key is read once for all of them.
    keys, reads = zip(*(_keys_of(*cache) for cache in caches), strict=True)
    kv, read = torch.cat(keys), torch.cat(reads, dim=1)
    scores = q[:, 0].double() @ kv.T * softmax_scale
    scores = scores.masked_fill(~read[:, None], float("-inf"))
    sink = attn_sink.double()[None, :, None].expand(len(q), -1, -1)
    weights = torch.cat([scores, sink], dim=2).softmax(-1)[..., :-1]
    return (weights @ kv).to(q.dtype)[:, None, :, :head_dim_v], None


def _keys_of(pages, table, lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys ``[U, 512]`` fp64 that some row names, and which row reads which, ``[n, U]``."""
    table = table[:, 0].long()
    named = (torch.arange(table.shape[1]) < lengths[:, None]) & (table >= 0)
    slots, which = table[named].unique(return_inverse=True)
    read = torch.zeros(len(table), len(slots), dtype=torch.bool)
    read[named.nonzero()[:, 0], which] = True
    assert read.sum() == named.sum(), "a row names a key twice"
    return load_latents(pages, slots).double(), read


def fp8_paged_mqa_logits_torch(q_fp8, kvcache_fp8, weight, seq_lens, page_table, max_seq_len):
    """``sum_h w_h relu(q_h k)`` of every compressed row, ``[n, max_seq_len]`` fp32.

    SGLang's torch form rounds to bf16, where top-k meets ties; DeepGEMM's does not.
    """
    rows, page = len(q_fp8), kvcache_fp8.shape[1]
    page_table = page_table[:, : max(1, -(-int(seq_lens.max()) // page))]
    raw = kvcache_fp8.view(kvcache_fp8.shape[0], -1)[page_table.clamp(min=0).long()]
    k = raw[..., : page * INDEX].contiguous().view(torch.float8_e4m3fn).double()
    scale = raw[..., page * INDEX :].contiguous().view(torch.float32).view(rows, -1)
    k = k.view(rows, -1, INDEX)
    scores = torch.bmm(k, q_fp8[:, 0].double().transpose(1, 2)).relu()
    scores = (scores * weight.double()[:, None]).sum(2) * scale
    seen = torch.arange(scores.shape[1]) < seq_lens[:, None]
    scores = torch.where(seen, scores, 0.0).float()
    return F.pad(scores, (0, max_seq_len - scores.shape[1]))


def first_of_ties(x, k, dim=-1, largest=True, sorted=True):
    """``torch.topk`` whose choice among equal scores does not depend on the table's width.

    With few index heads many scores are exactly zero.
    """
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def topk_transform_pytorch_vectorized(
    scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices
):
    """SGLang's own, with :func:`first_of_ties`."""
    from sglang.srt.layers.attention.dsv4 import indexer

    given = (scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)
    indexer._topk_transform_vectorized(*given, topk_op=first_of_ties)


def init_compression_metadata(
    seq_lens, positions, raw_out_loc, page_table, page_size, compute_page_indices
):
    """Where each token's compressed rows go and which of them it may read."""
    found = []
    writes = len(raw_out_loc)
    for ratio in (4, 128):
        done = seq_lens[:writes] % ratio == 0
        found += [
            torch.where(done, raw_out_loc.long() // ratio, 0),
            (positions // ratio * ratio).int(),
            (seq_lens // ratio).int(),
            (seq_lens // ratio).clamp_min(1).int(),
        ]
    indices = None
    if compute_page_indices:
        slots = page_size // 128
        offset = torch.arange(slots * page_table.shape[1])
        indices = page_table[:, offset // slots] * slots + offset % slots
        indices = torch.where(offset < (seq_lens // 128)[:, None], indices, -1).int()
    return (*found, indices)
