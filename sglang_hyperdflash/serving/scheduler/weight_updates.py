"""New weights for a running server (``/update_weights_from_disk`` and similar) are the target's.

By default SGLang loads them into the draft model, too. A drafter with a checkpoint of its own
refuses them, and SGLang's rollback, which reads the same files again, ends the server. Embeddings
and head, which the drafter shares with the target, are the target's own memory; with attention
data parallelism the embeddings are a copy made at start (``_cache_full_embed_weight``).
"""

from __future__ import annotations

from typing import Any

from sglang_hyperdflash import ALGORITHM, is_ours
from sglang_hyperdflash.seams import around

# Seam: ``_unsupported_derived_weight_cache_error`` reads it of a model, and answers with it.
REFUSAL = "_derived_weight_cache_error"
GRAPHS_STAY = (
    f"{ALGORITHM} does not support recapture_cuda_graph: every verify width has graphs of its own, "
    "which read the new weights in place. Send the request without it."
)
DRAFTER_STAYS = (
    f"A {ALGORITHM} drafter takes no new weights while it serves: kernels cache values derived "
    "from the old ones. Restart the server with the new drafter; the target's weights alone "
    "can be updated (selector target or all)."
)


@around(
    "sglang.srt.managers.scheduler_components.weight_updater"
    ":SchedulerWeightUpdaterManager._select_runners",
    "ea3832c5abd6",
)
def target_alone(original, self, selector: str = "all") -> list[tuple[str, Any]]:
    """The target's runner by default; a request that selects the draft is refused."""
    runners = original(self, selector)
    if selector == "all" and is_ours(self.tp_worker.model_runner.spec_algorithm):
        runners = [(role, runner) for role, runner in runners if role == "target"]
    return runners


@around(
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ":WeightUpdater.update_weights_from_disk",
    "89398ae2b227",
)
def keep_graphs(
    original, self, model_path, load_format, weight_name_filter=None, recapture_cuda_graph=False
) -> tuple[bool, str]:
    """Refuse to capture graphs again, of which SGLang would replace one width's alone.

    Where there are none, as on a CPU, SGLang ignores what was asked.
    """
    from sglang_hyperdflash.serving.width.lanes import captured

    runner = self.get_model_runner()
    if recapture_cuda_graph and is_ours(runner.spec_algorithm) and captured(runner):
        return False, GRAPHS_STAY
    return original(self, model_path, load_format, weight_name_filter, recapture_cuda_graph)
