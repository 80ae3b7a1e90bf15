"""Verification rehearsed at start, as large as it will be, so that sizing sees its memory."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, propose
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification.exact import Draws, verify_block, weights_of


def verification_peak(renorm: Any, candidates: int, bs: int, logits: torch.Tensor) -> int:
    """Peak bytes of one verification of ``logits [bs * B, V]`` on CUDA.

    Half the requests have a seed, all filter by top-k, top-p and min-p: the most there is.

    Args:
        renorm: of ``exact.weights_of``. candidates: K of each draft.
    """
    block, device = len(logits) // bs, logits.device
    ones, seeds = torch.ones(bs, device=device), torch.arange(bs, device=device)
    limits = torch.full((bs,), candidates, dtype=torch.int32, device=device)
    sampling = Sampling(ones, limits, 0.95 * ones, 0.01 * ones, True, True, True, True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    # The proposal lives through its verification.
    ids = torch.arange(candidates, device=device).repeat(bs, block - 1, 1)
    found = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32))
    positions = torch.zeros(bs, block, dtype=torch.int64, device=device)
    proposal = propose(found, seeds, None, sampling, seeds, positions[:, 1:], ones)
    draws = Draws(seeds, seeds % 2 == 0)
    weights = weights_of(logits, sampling.repeated(block), renorm)
    verdict = verify_block(proposal, logits, weights, sampling, draws, positions)
    del weights
    # Of its own: nothing that is learnt here may reach a request.
    DraftTemperature(device).learn(proposal, sampling, draws.seeded, verdict)
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before
