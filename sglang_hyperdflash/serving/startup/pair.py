"""The loaded pair of target and drafter, checked against each other when the worker starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_hyperdflash.draft.config import check_fingerprint
from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.serving.drafting.temperature import DRAFT_TEMPERATURE
from sglang_hyperdflash.serving.startup.operators import kernels_in_use
from sglang_hyperdflash.serving.width.settings import WIDTH, WIDTHS
from sglang_hyperdflash.targets.loaded import target_hc_head
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops.operator import OPERATORS_VARIABLE

logger = logging.getLogger(__name__)

# What makes a rank's rounds, or the requests that it takes, others than its peers'. Where a rank
# records is its own affair.
SHARED = (WIDTH, WIDTHS, DRAFT_TEMPERATURE, POOL_RATIO, OPERATORS_VARIABLE)


def check_pair(worker: Any) -> None:
    """Refuse a target whose ``hc_head`` is not the drafter's; sizes were checked before the load.

    Raises:
        HyperDFlashConfigError: expected, found and what to do.
    """
    config = worker.draft_model.hyperdflash_config
    hc_head = target_hc_head(worker.target_worker.model_runner.model)
    check_fingerprint(config, None if hc_head is None else hc_head.fingerprint())


def log_ready(worker: Any) -> None:
    """One line of what the pair runs on."""
    draft, config = worker.draft_model, worker.draft_model.hyperdflash_config
    kernels = kernels_in_use(draft.hidden_norm.weight.is_cuda)
    # SGLang drops its fused write, with a warning, where it cannot set it up.
    fused_kv = worker._fused_kv_helper is not None
    drafter = worker.drafter
    head = drafter.head and f"rank {config.dependency.rank}, K {drafter.candidates}"
    logger.info(
        f"HYPERDFLASH ready: source={config.source} reducer={config.reducer} kernels={kernels} "
        f"fused_kv={fused_kv} block_size={config.block_size} paths={config.hc_mult} head={head} "
        f"causal={config.causal}"
    )


def check_ranks_agree(gather: Callable[[list[str]], list[list[str]]]) -> None:
    """Refuse nodes whose environments differ in a variable of ``SHARED``.

    Seam: ``gather`` is ``GroupCoordinator.all_gather_object``.

    Raises:
        HyperDFlashConfigError: on every rank, so that all of them end.
    """
    values = {name: os.environ.get(name, "").strip() for name in SHARED}
    every = gather(list(values.values()))
    for name, values in zip(SHARED, zip(*every, strict=True), strict=True):
        if len(set(values)) > 1:
            said = "; ".join(f"rank {i}: {value or 'unset'}" for i, value in enumerate(values))
            raise HyperDFlashConfigError(f"{name} must be the same on all nodes; found {said}.")


def check_processors(width_1_allowed: bool, enabled: bool) -> None:
    """Custom logit processors need rounds of width 1.

    Raises:
        HyperDFlashConfigError: they are enabled on a server that verifies whole blocks only.
    """
    if enabled and not width_1_allowed:
        raise HyperDFlashConfigError(
            "--enable-custom-logit-processor: expected a server that can verify one row per "
            "request; found attention data parallelism, two-batch overlap or "
            "--enable-pd-role-switch, where only whole blocks are verified. Drop the flag."
        )
