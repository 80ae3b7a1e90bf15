"""Verification rehearsed at start: its memory, as large as it will be, and its kernels."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import torch

from sglang_hyperdflash.draft.adjust import Adjustments, adjust_rows
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification.exact import (
    Rows,
    read_rows,
    unpack,
    verify_block,
    weights_of,
)


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
    draws, learner = Draws(seeds, seeds % 2 == 0), DraftTemperature(device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    # The proposal lives through its verification.
    ids = torch.arange(candidates, device=device).repeat(bs, block - 1, 1)
    found = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32))
    at = torch.zeros(bs, block, dtype=torch.int64, device=device)
    proposal = propose(found, None, at, at, sampling, draws, learner.current)
    kept = weights_of(logits.view(bs, block, -1), sampling, renorm).flatten(0, 1)
    rows = read_rows(logits, kept, sampling, draws, at, all_draw=False)
    packed, p = verify_block(rows, at, at, proposal, sampling, draws, logits.shape[-1])
    del kept, rows
    # Of its own: nothing that is learnt here may reach a request.
    learner.learn(proposal, p, unpack(packed, bs, block), at, sampling, draws, logits.shape[-1])
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before


def compile_kernels(
    head: Any, candidates: int, vocabulary: int, widths: Iterable[int], device: torch.device | str
) -> None:
    """Run each operator of a round once for every kind of batch: none compiles while serving.

    Args:
        head: the dependency head, or None; candidates: K of each draft; widths: of rounds.
    """

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    seeds, one = new(1, dtype=torch.int64), torch.ones(1, device=device)
    top_ks = torch.full((1,), 1 << 30, dtype=torch.int32, device=device)
    counts, penalties = new(1, vocabulary, dtype=torch.int32), new(1, 3)
    parts = (
        {"counts": counts, "slots": seeds, "penalties": penalties},
        {"end_ids": seeds.view(1, 1), "earliest": seeds},
        {"bias": new(1, vocabulary)},
    )
    changes = [
        Adjustments(**{name: tensor for part in chosen for name, tensor in part.items()})
        for n in range(4)
        for chosen in combinations(parts, n)
    ]
    learner = DraftTemperature(device)
    for width, (filters, joint) in product(widths, ((False, False), (True, False), (True, True))):
        sampling = Sampling(one, top_ks, one, 0.0 * one, filters, filters, filters, joint)
        logits, at = new(width, vocabulary), new(1, width, dtype=torch.int64)
        kept = torch.ones_like(logits) if filters else None
        ids = torch.arange(candidates, device=device).repeat(1, width - 1, 1)
        gates = None if head is None else new(1, width - 1, head.gate.out_features)
        found, proposal = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32), gates), None
        for draws in (Draws(seeds, seeds == 0, False), Draws(seeds, seeds != 0)):
            for change in changes if width > 1 else ():
                given = sampling, draws, learner.current, change
                proposal = propose(found, head, at, at, *given)
            rows = read_rows(logits, kept, sampling, draws, at, all_draw=proposal is None)
            packed, p = verify_block(rows, at, at, proposal, sampling, draws, vocabulary)
            verify_block(Rows(rows.tokens), at, at, None, sampling, draws, vocabulary)
            if proposal is not None:
                learner.reset()  # every first round is learnt from
                committed = unpack(packed, 1, width)
                learner.learn(proposal, p, committed, at, sampling, draws, vocabulary)
        # Batches without drafts, of greedy requests with penalties among others.
        read_rows(logits, None, sampling, draws, at, all_draw=True)
        for change in changes[1:]:
            adjust_rows(logits.unsqueeze(0), at, at, *change.tensors)
