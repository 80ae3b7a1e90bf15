"""Device memory of a HYPERDFLASH server besides weights and K/V, counted before it starts.

SGLang reserves it as one sum: what ``--mem-fraction-static`` leaves. That sum also holds the
activations of long prefills and the target's own graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hyperdflash.serving.draft_kv.attention import BLOCKS, graph_context

# Matrices [rows, V] of fp32 that verifying a sampled batch holds at once, besides its logits:
# probabilities, what top-k and top-p make of them, and a mask (serving/verification/exact.py).
# Without filters there is none. tests/unit/commands/test_plan_memory.py measures this number.
VERIFY_MATRICES = 3.25
# Bytes of one candidate (id and score), and of the argmax that a draft row keeps.
CANDIDATE_BYTES, FIRST_BYTES = 12, 8
# FlashInfer's wrapper for one captured batch size: its plan and its K/V lengths.
WRAPPER_BYTES = (8 << 20) + 4 * 32768


@dataclass(frozen=True)
class Shape:
    """The dimensions that determine a server's buffers on one GPU.

    Attributes:
        requests: the most requests at once.
        captured: the batch sizes with a CUDA graph.
        block: the most tokens of a request that are verified at once.
        widths: all verify widths.
        residual: the numbers that the drafter reads of a token.
        vocabulary: the tokens of the vocabulary.
        context: the server's context, in tokens.
        page: the tokens of a page.
        heads: the drafter's query heads on this GPU.
        head_dim: the width of a value.
        window: the drafter's window, in tokens; None without one.
        candidates: K, the candidates of each draft row.
        rank: of the dependency head; 0 without one.
        shards: the GPUs that share the rows of the LM head.
        splits: the most parts that Triton cuts a context's K/V into.
        copied: the most tokens of a request that drafts may copy.
        workspace: the bytes of FlashInfer's workspace; 0 if the target has one already.
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
    """Return the bytes on one GPU by purpose, besides draft attention (:func:`graph_bytes`).

    The residual is bf16, in one buffer for all graphs: ``shared_residual``. A draft's graph
    projects all of its rows at once, in bf16, before it takes their candidates; graphs share that
    memory, so only the largest graph is counted. Sampled requests have probabilities, and requests
    with penalties have counts.
    """
    rows = s.requests * s.block
    largest = max(s.captured, default=0)
    drafts = largest * (s.block - 1)
    draft_bytes = s.candidates * CANDIDATE_BYTES + FIRST_BYTES + 4 * s.rank
    return {
        "residual of the captured batches": 2 * largest * s.block * s.residual,
        "drafts' logits": 2 * drafts * -(-s.vocabulary // s.shards),
        "drafts' candidates": drafts * draft_bytes,
        "verification of sampled requests": int(4 * VERIFY_MATRICES * rows * s.vocabulary),
        "counts of requests with penalties": 4 * (s.requests + 1) * s.vocabulary,
        "tokens that drafts may copy": 4 * s.requests * min(s.copied, s.context + s.block),
    }


def graph_bytes(s: Shape) -> dict[str, int]:
    """Return the bytes of the buffers of a draft's CUDA graphs, by attention backend.

    Every verify width with drafts has a separate backend, with indices for the contexts of all
    requests. Triton keeps an fp32 output and its logarithm for every row, head and split.
    FlashInfer has one workspace for all backends of a process.
    """
    context, widths = graph_context(s.context, s.window, s.block), [w for w in s.widths if w > 1]
    slots = s.requests * (context + BLOCKS * s.block)
    partial = 4 * s.requests * sum(widths) * s.heads * s.splits * (s.head_dim + 1)
    plans = len(s.captured) * WRAPPER_BYTES
    by_slot = {
        "triton": len(widths) * 8 * slots + partial,
        "flashinfer": len(widths) * (4 * slots + plans) + s.workspace,
    }
    pages = len(widths) * 4 * s.requests * -(-context // s.page)
    return by_slot if s.window is not None else {"fa3": pages, "fa4": pages, **by_slot}
