"""Device memory of a HYPERDFLASH server besides weights and K/V, counted before it starts.

SGLang reserves it as one sum: what ``--mem-fraction-static`` leaves. Activations of long prefills
and the target's own graphs come out of the same share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Matrices [rows, V] of fp32 that verifying a sampled batch holds at once, its logits not counted:
# probabilities, and what temperature, top-k, top-p and min-p make of them (serving/exact.py).
# tests/unit/serving/test_extra_device_memory.py measures it.
VERIFY_MATRICES = 4.5
# Bytes of a drafter's candidate: id, score; and its share of the argmax that a draft row keeps.
CANDIDATE_BYTES, FIRST_BYTES = 12, 8


@dataclass(frozen=True)
class Batches:
    """How large a server's batches become.

    Attributes:
        requests: most at once; captured: batch sizes that have a CUDA graph.
        block: tokens of a request that are verified at once, at most.
        residual: width of what the drafter reads of a token; vocabulary: tokens.
        candidates: of each draft row; rank: of the dependency head, 0 without one.
        shards: GPUs that share the LM head's rows.
    """

    requests: int
    captured: Sequence[int]
    block: int
    residual: int
    vocabulary: int
    candidates: int = 64
    rank: int = 0
    shards: int = 1


def extra_device_memory(b: Batches) -> dict[str, int]:
    """Bytes on one GPU by what they are for; draft attention's: ``draft_attention``.

    The residual is bf16, in one buffer for all graphs: ``shared_residual``. The draft's graph
    projects all of its rows at once, in bf16, before it takes their candidates; captures share that
    memory, so it is counted of the largest alone. Probabilities and counts are those of sampled
    requests and of requests with penalties.
    """
    rows = b.requests * b.block
    largest = max(b.captured, default=0)
    drafts = largest * (b.block - 1)
    draft = b.candidates * CANDIDATE_BYTES + FIRST_BYTES + 4 * b.rank
    return {
        "residual of the captured batches": 2 * largest * b.block * b.residual,
        "drafts' logits": 2 * drafts * -(-b.vocabulary // b.shards),
        "drafts' candidates": drafts * draft,
        "verification of sampled requests": int(4 * VERIFY_MATRICES * rows * b.vocabulary),
        "counts of requests with penalties": 4 * (b.requests + 1) * b.vocabulary,
    }
