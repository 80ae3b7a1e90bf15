"""What a request may ask of a server of ours."""

from __future__ import annotations

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.seams import Seam

_worker_is_ours = False


def mark_worker_ours() -> None:
    """Tell the request check that this scheduler process runs our worker."""
    global _worker_is_ours
    _worker_is_ours = True


def worker_is_ours() -> bool:
    """Whether this process's worker is ours."""
    return _worker_is_ours


def refuse_lossy_requests(message, req, *args, **kwargs):
    """Refuse sampling parameters that a verified block cannot honour exactly.

    SGLang computes penalties once per round and freezes them for the block, so the tokens
    accepted inside it would not count. Runs for every DFLASH-family request; returns SGLang's
    own message untouched for other algorithms.
    """
    if message is not None or not worker_is_ours():
        return message
    return unsupported_sampling(req.sampling_params)


def unsupported_sampling(params) -> str | None:
    """Why a request's sampling parameters cannot be honoured exactly, or None.

    Args:
        params: SGLang's normalised ``SamplingParams``.
    """
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    for name, value in neutral.items():
        found = getattr(params, name, value)
        if found is not None and found != value:
            return (
                f"{ALGORITHM} does not support {name}={found}: SGLang fixes penalties for a whole "
                f"drafted block, so they would not be exact. Send {name}={value} or serve "
                "without speculative decoding."
            )
    return None


SEAMS = (
    Seam(
        "sglang.srt.speculative.dflash_utils:validate_dflash_request",
        "after",
        refuse_lossy_requests,
        ("req", "enable_overlap"),
        "249cb3f605b6",
        "penalties are frozen for a block and would not be exact",
    ),
)
