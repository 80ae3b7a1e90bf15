"""Verification rehearsed at start, as large as it will be, so that sizing sees its memory."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, propose
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification.exact import Draws
from sglang_hyperdflash.serving.verification.verifier import Verifier


def verification_peak(
    verifier: Verifier,
    candidates: int,
    anchors: torch.Tensor,
    target_logits: torch.Tensor,
    sampling_info: SamplingBatchInfo,
) -> int:
    """Peak bytes of one verification on CUDA.

    Half the requests have a seed, all filter by top-k, top-p and min-p: the most there is.

    Args:
        candidates: K of each draft. anchors: ``[bs]`` int64; target_logits: ``[bs * B, V]``.
    """
    bs, device = len(anchors), anchors.device
    drafts = len(target_logits) // bs - 1
    sampling = Sampling(
        torch.ones(bs, device=device),
        torch.full((bs,), candidates, dtype=torch.int32, device=device),
        sampling_info.top_ps,
        torch.full((bs,), 0.01, device=device),
        True,
        True,
        True,
        True,
    )
    seeds = torch.arange(bs, device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    # The proposal lives through its verification.
    ids = torch.arange(candidates, device=device).repeat(bs, drafts, 1)
    proposal = propose(
        Candidates(ids, torch.zeros_like(ids, dtype=torch.float32)),
        anchors,
        None,
        sampling,
        seeds,
        torch.zeros(bs, drafts, dtype=torch.int64, device=device),
        torch.ones(bs, device=device),
    )
    positions = torch.zeros(bs, drafts + 1, dtype=torch.int64, device=device)
    draws = Draws(seeds, seeds % 2 == 0)
    verdict = verifier.verify(target_logits, sampling, proposal, draws, positions)
    # Of its own: nothing that is learnt here may reach a request.
    DraftTemperature(device).learn(proposal, sampling, draws.seeded, verdict)
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before


def prewarm_batch_size(worker: Any, otherwise: int) -> int:
    """The largest batch that is served; SGLang rehearses the largest captured one, ``otherwise``.

    Larger ones verify eagerly. A prefill node verifies none.
    """
    most = worker.model_runner.max_running_requests
    if not most or worker.server_args.disaggregation_mode == "prefill":
        return otherwise
    return max(1, int(most))
