"""New weights for a running server (``/update_weights_from_tensor`` and similar).

By default they are the target's. SGLang would load them into the draft model, too; a drafter with
a checkpoint of its own refuses them, and SGLang's rollback, which reads the same files again, ends
the server. Embeddings and head, which the drafter shares with the target, are the target's own
memory; with attention data parallelism the embeddings are a copy made at start
(``_cache_full_embed_weight``). A request that selects the draft replaces the drafter's weights
(``HyperDFlashDraftModel.load_weights``).
"""

from __future__ import annotations

from typing import Any

from sglang_hyperdflash import ALGORITHM, is_ours
from sglang_hyperdflash.seams import around
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# Seam: ``_unsupported_derived_weight_cache_error`` reads it of a model, and answers with it.
REFUSAL = "_derived_weight_cache_error"
GRAPHS_STAY = (
    f"{ALGORITHM} does not support recapture_cuda_graph: every verify width has graphs of its own, "
    "which read the new weights in place. Send the request without it."
)
QUANTIZED = (
    f"A quantized {ALGORITHM} drafter takes no new weights while it serves. Restart the server "
    "with the new drafter, or without --speculative-draft-model-quantization."
)
FOLLOWS = (
    "HYPERDFLASH_FOLLOW is set: this server takes drafters from that folder only. Publish the "
    "drafter there."
)
# Before the selector of a request that only reads.
READ = "read "
# Of update_weights_from_tensor: those that end in the draft model's load_weights.
LOAD_FORMATS = (None, "flattened_bucket")


@around(
    "sglang.srt.managers.scheduler_components.weight_updater"
    ":SchedulerWeightUpdaterManager._select_runners",
    "ea3832c5abd6",
)
def target_by_default(original, self, selector: str = "all") -> list[tuple[str, Any]]:
    """The target's runner, unless a request selects the draft.

    ``all`` is what a client means that names none, and a trainer of the target sends no drafter.
    """
    runners = original(self, selector.removeprefix(READ))
    if selector.startswith(READ):
        return runners
    if selector == "all" and is_ours(self.tp_worker.model_runner.spec_algorithm):
        runners = [(role, runner) for role, runner in runners if role == "target"]
    recorder = getattr(self.draft_worker, "recorder", None)
    if recorder is not None and any(role == "target" for role, _ in runners):
        recorder.stop("the target may have other weights now than its store is of")
    return runners


@around(
    "sglang.srt.managers.scheduler_components.weight_updater"
    ":SchedulerWeightUpdaterManager.check_weights",
    "92aa98b2e3cd",
)
def read_what_is_selected(original, self, recv_req) -> Any:
    """Look at both models' weights, and record on; of these actions ``reset_tensors`` writes."""
    if is_ours(self.tp_worker.model_runner.spec_algorithm) and recv_req.action != "reset_tensors":
        recv_req.selector = READ + recv_req.selector
    return original(self, recv_req)


@around(
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ":WeightUpdater.update_weights_from_tensor",
    "a15e7d279045",
)
def answer_wrong_tensors(original, self, named_tensors, load_format=None) -> tuple[bool, str]:
    """Answer with what is wrong with a drafter's tensors: an exception would end the server."""
    runner = self.get_model_runner()
    drafts = runner.is_draft_worker and is_ours(runner.spec_algorithm)
    if drafts and load_format not in LOAD_FORMATS:
        return False, f"a {ALGORITHM} drafter is sent without load_format, found {load_format!r}."
    try:
        return original(self, named_tensors, load_format)
    except HyperDFlashConfigError as error:
        return False, str(error)


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
