"""New weights for a running server (``/update_weights_from_disk`` and similar) are the target's.

By default SGLang loads them into the draft model, too. A drafter with a checkpoint of its own
refuses them, and SGLang's rollback, which reads the same files again, ends the server. Embeddings
and head, which the drafter shares with the target, are the target's own memory; with attention
data parallelism the embeddings are a copy made at start (``_cache_full_embed_weight``).
"""

from __future__ import annotations

from typing import Any

from sglang_hyperdflash import ALGORITHM, is_ours
from sglang_hyperdflash.seams import Seam

# Seam: ``_unsupported_derived_weight_cache_error`` reads it of a model, and answers with it.
REFUSAL = "_derived_weight_cache_error"
DRAFTER_STAYS = (
    f"A {ALGORITHM} drafter takes no new weights while it serves: kernels cache values derived "
    "from the old ones. Restart the server with the new drafter; the target's weights alone "
    "can be updated (selector target or all)."
)


def target_alone(original, self, selector: str = "all") -> list[tuple[str, Any]]:
    """The target's runner by default; a request that selects the draft is refused."""
    runners = original(self, selector)
    if not is_ours(self.tp_worker.model_runner.spec_algorithm):
        return runners
    if selector == "all":
        return [(role, runner) for role, runner in runners if role == "target"]
    return runners


SEAMS = (
    Seam(
        "sglang.srt.managers.scheduler_components.weight_updater"
        ":SchedulerWeightUpdaterManager._select_runners",
        "around",
        target_alone,
        ("self", "selector"),
        "ea3832c5abd6",
        "a drafter would be given the target's new weights",
    ),
)
