"""What changes logits, for the kernels that draft and the one that adjusts a target's rows."""

import torch

from sglang_hyperdflash.draft.adjust import NEUTRAL

NAMES = ("counts", "slots", "penalties", "end_ids", "earliest", "bias")
EVERYTHING = "penalties end_ids bias"
PENALTIES = [(0.3, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.3), (0.0, 0.0, 0.6)]
PENALTIES += [(-0.4, 0.2, 1.1), NEUTRAL]


def adjusting(changes, start, block, ends, vocabulary, g, bias_dtype):
    """The operators' last arguments by name, None but of ``changes``; some ``ends`` end an answer.

    The first end tokens may come before the block after ``start``, within it and after it.
    """
    bs, known = len(start), dict.fromkeys(NAMES)
    if "penalties" in changes:
        known["counts"] = torch.randint(0, 3, (bs + 3, vocabulary), generator=g, dtype=torch.int32)
        known["slots"] = torch.randperm(bs + 3, generator=g)[:bs]
        known["penalties"] = torch.tensor([PENALTIES[b % 6] for b in range(bs)])
    if "end_ids" in changes:
        known["end_ids"] = ends.masked_fill(torch.rand(ends.shape, generator=g) < 0.4, -1)
        known["earliest"] = start[:, 0] + torch.arange(bs) % (block + 2)
    if "bias" in changes:
        bias = torch.randn(bs, vocabulary, generator=g)
        bias[torch.rand(bias.shape, generator=g) < 0.1] = float("-inf")
        bias[::3] = 0.0
        known["bias"] = bias.to(bias_dtype)
    return known
