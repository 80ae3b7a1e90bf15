"""Device memory of a HYPERDFLASH server besides weights and K/V, counted before it starts.

SGLang reserves it as one sum: what ``--mem-fraction-static`` leaves. Activations of long prefills
and the target's own graphs come out of the same share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hyperdflash.serving.draft_kv.attention import BLOCKS, graph_context

# Matrices [rows, V] of fp32 that verifying a sampled batch holds at once, its logits not counted:
# probabilities, what top-k and top-p make of them, and a mask (serving/verification/exact.py).
# Without filters there is none. tests/unit/commands/test_plan_memory.py measures it.
VERIFY_MATRICES = 3.25
# Bytes of a drafter's candidate: id, score; and its share of the argmax that a draft row keeps.
CANDIDATE_BYTES, FIRST_BYTES = 12, 8
# FlashInfer's wrapper of one captured batch size: its plan and its K/V lengths.
WRAPPER_BYTES = (8 << 20) + 4 * 32768


@dataclass(frozen=True)
class Shape:
    """What sizes a server's buffers on one GPU.

    Attributes:
        requests: most at once; captured: batch sizes that have a CUDA graph.
        block: tokens of a request that are verified at once, at most; widths: all verify widths.
        residual: width of what the drafter reads of a token; vocabulary: tokens.
        context: the server's, in tokens; page: tokens.
        heads, head_dim: the drafter's query heads on this GPU, and of a value.
        window: the drafter's, in tokens; candidates: of each draft row.
        rank: of the dependency head, 0 without one; shards: GPUs that share the LM head's rows.
        splits: parts that Triton cuts a context's K/V into, at most.
        copied: tokens of a request that drafts may copy, of any context.
        workspace: bytes of FlashInfer's, 0 where the target has one already.
    """

    requests: int
    captured: Sequence[int]
    block: int
    widths: Sequence[int]
    residual: int
    vocabulary: int
    context: int
    page: int
    heads: int
    head_dim: int
    window: int | None = None
    candidates: int = 64
    rank: int = 0
    shards: int = 1
    splits: int = 8
    copied: int = 0
    workspace: int = 0


def extra_device_memory(s: Shape) -> dict[str, int]:
    """Bytes on one GPU by purpose; draft attention's: :func:`graph_bytes`.

    The residual is bf16, in one buffer for all graphs: ``shared_residual``. The draft's graph
    projects all of its rows at once, in bf16, before it takes their candidates; captures share that
    memory, so it is counted of the largest alone. Probabilities and counts are those of sampled
    requests and of requests with penalties.
    """
    rows = s.requests * s.block
    largest = max(s.captured, default=0)
    drafts = largest * (s.block - 1)
    draft = s.candidates * CANDIDATE_BYTES + FIRST_BYTES + 4 * s.rank
    return {
        "residual of the captured batches": 2 * largest * s.block * s.residual,
        "drafts' logits": 2 * drafts * -(-s.vocabulary // s.shards),
        "drafts' candidates": drafts * draft,
        "verification of sampled requests": int(4 * VERIFY_MATRICES * rows * s.vocabulary),
        "counts of requests with penalties": 4 * (s.requests + 1) * s.vocabulary,
        "tokens that drafts may copy": 4 * s.requests * min(s.copied, s.context + s.block),
    }


def graph_bytes(s: Shape) -> dict[str, int]:
    """Bytes of the buffers of a draft's CUDA graphs, by attention backend.

    Every width that drafts has a backend of its own, with indices for a whole block's contexts.
    Triton has an fp32 output and its logarithm of every row, head and split; FlashInfer one
    workspace for all backends of a process.
    """
    context, widths = graph_context(s.context, s.window, s.block), [w for w in s.widths if w > 1]
    slots = s.requests * (context + BLOCKS * s.block)
    partial = 4 * s.requests * sum(widths) * s.heads * s.splits * (s.head_dim + 1)
    plans = len(s.captured) * WRAPPER_BYTES
    found = {
        "triton": len(widths) * 8 * slots + partial,
        "flashinfer": len(widths) * (4 * slots + plans) + s.workspace,
    }
    pages = len(widths) * 4 * s.requests * -(-context // s.page)
    return found if s.window is not None else {"fa3": pages, "fa4": pages, **found}
