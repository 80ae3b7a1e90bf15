"""The loaded pair of target and drafter, checked against each other when the worker starts."""

from __future__ import annotations

import logging

from sglang_hyperdflash.draft.config import check_fingerprint
from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.serving.settings import WidthSetting
from sglang_hyperdflash.serving.startup.operators import kernels_in_use
from sglang_hyperdflash.targets.loaded import target_hc_head
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

logger = logging.getLogger(__name__)


def check_pair(runners: Runners) -> None:
    """Refuse a target whose ``hc_head`` is not the drafter's; sizes were checked before the load.

    Raises:
        HyperDFlashConfigError: expected, found and what to do.
    """
    hc_head = target_hc_head(runners.target.model)
    check_fingerprint(
        runners.draft_model.hyperdflash_config, None if hc_head is None else hc_head.fingerprint()
    )


def log_ready(runners: Runners, fused_kv: bool, width: WidthSetting) -> None:
    """One line of what the pair runs on.

    Args:
        fused_kv: SGLang drops its fused write, with a warning, where it cannot set it up.
    """
    config = runners.draft_model.hyperdflash_config
    kernels = kernels_in_use(runners.draft_model.hidden_norm.weight.is_cuda)
    head = config.dependency and f"rank {config.dependency.rank}, K {config.candidates}"
    logger.info(
        f"HYPERDFLASH ready: source={config.source} reducer={config.reducer} kernels={kernels} "
        f"fused_kv={fused_kv} block_size={config.block_size} paths={config.hc_mult} head={head} "
        f"causal={config.causal}"
    )
    logger.info("HYPERDFLASH widths: %s of %s", width.mode, width.widths)


def check_processors(width_1_allowed: bool, enabled: bool) -> None:
    """Custom logit processors need rounds of width 1.

    Raises:
        HyperDFlashConfigError: they are enabled where no round can be narrowed to one row.
    """
    if enabled and not width_1_allowed:
        raise HyperDFlashConfigError(
            "--enable-custom-logit-processor: expected a server that can verify one row per "
            "request; found attention data parallelism or two-batch overlap, where no round can be "
            "narrowed for one request. Drop the flag."
        )
