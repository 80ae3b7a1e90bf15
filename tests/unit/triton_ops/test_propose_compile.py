"""Kernels that draft and learn are compiled once: any batch runs what the start has compiled."""

from __future__ import annotations

from tests.unit.triton_ops.specialised import compilations

LAUNCHES = """
from triton_ops import adjust_kernel, learn_kernel, propose_kernel

record("propose", propose_kernel._propose_kernel)
record("greedy", propose_kernel._greedy_kernel)
record("adjust", adjust_kernel._adjust_kernel)
record("learn", learn_kernel._request_kernel)
record("sum", learn_kernel._sum_kernel)
DRAFTS, WIDTH, RANK, VOCABULARY, LONG = 3, 64, 16, 12_928, torch.int64
table, counts = torch.empty(VOCABULARY, RANK), torch.empty(100, VOCABULARY, dtype=torch.int32)
learnt = torch.empty(4), torch.empty(2, 4, dtype=torch.float64), torch.empty(2), VOCABULARY, 1e3

for bs, skipped, ends in itertools.product((1, 2, 7, 16, 100, 257), (0, 1), (1, 2, 16)):
    def new(*shape, dtype=torch.float32):  # a view whose alignment is that of nothing
        return torch.empty(bs + skipped, *shape, dtype=dtype)[skipped:]

    candidates = new(DRAFTS, WIDTH, dtype=LONG), new(DRAFTS, WIDTH), new(DRAFTS, RANK), table, table
    block_tokens = torch.empty(bs, 4 + ends + skipped, dtype=LONG)[:, skipped:]
    positions, bias = new(DRAFTS + 1, dtype=LONG), torch.empty(bs, VOCABULARY)
    changes = counts, new(dtype=LONG), new(3), new(ends, dtype=LONG), new(dtype=LONG), bias
    propose_kernel.launch(
        *candidates, block_tokens, new(dtype=LONG), new(dtype=torch.bool), positions, new(),
        new(dtype=torch.int32), new(), new(), torch.empty(2), True, True, *changes,
    )
    propose_kernel.launch_greedy(*candidates, block_tokens[:, 0])
    learn_kernel.launch(
        *candidates[:2], new(DRAFTS, dtype=LONG), new(DRAFTS, WIDTH), block_tokens,
        new(dtype=torch.int32), new(), new(dtype=torch.int32), new(), new(),
        new(dtype=torch.bool), new(dtype=LONG), positions, True, True, *learnt,
    )
    for rows in (1, 2, 16):
        logits = torch.empty(bs, rows, VOCABULARY, dtype=torch.bfloat16, device="meta")
        adjust_kernel.launch(logits, new(rows, dtype=LONG), new(rows, dtype=LONG), *changes)
"""


def test_no_batch_needs_a_compilation_of_its_own():
    names = "propose", "greedy", "adjust", "learn", "sum"
    assert compilations(LAUNCHES) == dict.fromkeys(names, 1)
