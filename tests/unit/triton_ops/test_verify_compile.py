"""Verification's kernels are compiled once: any batch runs what the start has compiled."""

from __future__ import annotations

from tests.unit.triton_ops.specialised import compilations

LAUNCHES = """
from triton_ops import accept_kernel, finish_kernel

record("accept", accept_kernel._accept_kernel)
record("share", finish_kernel._share_kernel)
record("commit", finish_kernel._commit_kernel)
DRAFTS, BLOCK, WIDTH, VOCABULARY = 3, 4, 8, 20_000

def arguments(bs, skipped, proposal, known):
    def new(*shape, dtype=torch.int64):  # a view whose alignment is that of nothing
        return torch.empty(bs * shape[0] + skipped, *shape[1:], dtype=dtype)[skipped:]

    def each(*shape, dtype=torch.int64):
        return new(1, *shape, dtype=dtype)

    logits = torch.empty(bs * BLOCK, VOCABULARY) if known else None
    sums = [new(BLOCK, dtype=torch.float32) if known else None for _ in range(2)]
    block_tokens = torch.empty(bs, BLOCK + skipped, dtype=torch.int64)[:, skipped:]
    ids = each(DRAFTS, WIDTH) if proposal else None
    q = each(DRAFTS, WIDTH, dtype=torch.float32) if proposal else None
    choice = each(DRAFTS) if proposal else None
    requests = [each(dtype=t) for t in (torch.float32, torch.int32, torch.bool, torch.int64)]
    target = logits, None, new(BLOCK), *sums, block_tokens, ids, q
    requests.append(each(BLOCK))
    lengths = each(dtype=torch.int32), each(dtype=torch.float64)
    accept = *target, choice, *requests, VOCABULARY
    return accept, (*target, *lengths, *requests, proposal, VOCABULARY)


for bs in (1, 2, 7, 16, 64, 100, 256, 448):
    for skipped in (0, 1):
        for proposal, known in ((True, True), (False, True), (False, False)):
            accept, finish = arguments(bs, skipped, proposal, known)
            accept_kernel.launch(*accept)
            finish_kernel.launch(*finish)
"""


def test_no_batch_needs_a_compilation_of_its_own():
    """With a proposal there is one, and without another, whatever is known of the rows."""
    assert compilations(LAUNCHES) == {"accept": 2, "share": 1, "commit": 2}
