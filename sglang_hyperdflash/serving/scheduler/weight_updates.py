"""New weights for a running server (``/update_weights_from_tensor`` and similar).

By default they are the target's. SGLang would load them into the draft model, too; a drafter with
a checkpoint of its own refuses them, and SGLang's rollback, which reads the same files again, ends
the server. Embeddings and head, which the drafter shares with the target, are the target's own
memory; with attention data parallelism the embeddings are a copy made at start
(``_cache_full_embed_weight``). The drafter's weights are replaced by a request that selects the
draft (``HyperDFlashDraftModel.load_weights``), and by ``/update_weights_from_disk`` with
``"load_format": "hyperdflash"``: between two rounds, since no answer depends on them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sglang_hyperdflash import ALGORITHM, is_ours
from sglang_hyperdflash.draft.published import DRAFTER_FORMAT, MANIFEST, Version
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
LOCAL_CONTROL = (
    "--enable-dp-attention-local-control-broadcast: ranks would take a new drafter at different "
    "rounds. Restart the server with the new drafter, or without the flag."
)
RELEASED = "the drafter's memory is released. Send it again after /resume_memory_occupation."
# Before the selector of a request that only reads.
READ = "read "
# Of update_weights_from_tensor: those that end in the draft model's load_weights.
LOAD_FORMATS = (None, "flattened_bucket")


@around(
    "sglang.srt.managers.scheduler_components.weight_updater"
    ":SchedulerWeightUpdaterManager._select_runners",
    "778803c5ed26",
)
def target_by_default(original, self, selector: str = "all") -> list[tuple[str, Any]]:
    """The target's runner, unless a request selects the draft.

    A client that names no selector sends ``all``, and a trainer of the target sends no drafter.
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
    "f7c2707ec767",
)
def read_what_is_selected(original, self, recv_req) -> Any:
    """Look at both models' weights, and record on; of these actions ``reset_tensors`` writes."""
    if is_ours(self.tp_worker.model_runner.spec_algorithm) and recv_req.action != "reset_tensors":
        recv_req.selector = READ + recv_req.selector
    return original(self, recv_req)


@around(
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ":WeightUpdater.update_weights_from_tensor",
    "301123886073",
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
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.update_weights_from_disk",
    "ee343564f0ad",
)
async def send_drafter_at_once(original, self, obj, request=None) -> tuple[bool, str, int]:
    """Send a drafter's folder to the schedulers without waiting for running requests.

    SGLang waits for them, and keeps new ones waiting: its weights are the target's.
    """
    ours = is_ours(self.server_args.speculative_algorithm)
    if not ours or obj.load_format != DRAFTER_FORMAT:
        return await original(self, obj, request)
    folder = Path(obj.model_path)
    try:
        if (folder / MANIFEST).is_file():  # reads all, so schedulers find it in the page cache
            await asyncio.to_thread(Version(obj.token_step, folder).check)
    except (HyperDFlashConfigError, OSError) as error:
        return False, str(error), 0
    self.auto_create_handle_loop()
    # It sends requests one after another, and collects every group's answer.
    answers = await self.update_weights_from_tensor_communicator(obj)
    wrong = [answer.message for answer in answers if not answer.success]
    return not wrong, wrong[0] if wrong else "The drafter was replaced.", 0


@around(
    "sglang.srt.managers.scheduler_components.weight_updater"
    ":SchedulerWeightUpdaterManager.update_weights_from_disk",
    "7dea681e1eed",
)
def load_target_or_drafter(original, self, recv_req) -> Any:
    """Load a drafter into the draft model; its version is the request's ``token_step``.

    Graphs are not captured again, of which SGLang would replace one width's alone. Where there are
    none, as on a CPU, SGLang ignores what was asked.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.managers.io_struct import (
        UpdateWeightFromDiskReqOutput,
        UpdateWeightsFromTensorReqOutput,
    )
    from sglang.srt.runtime_context import get_parallel

    from sglang_hyperdflash.serving.width.lanes import captured

    runner, draft = self.tp_worker.model_runner, self.draft_worker
    if not is_ours(runner.spec_algorithm):
        return original(self, recv_req)
    if recv_req.load_format == DRAFTER_FORMAT:
        wrong = getattr(draft.draft_model, REFUSAL, "")
        if get_parallel().enable_dp_attention_local_control_broadcast:
            wrong = LOCAL_CONTROL
        elif not wrong and GPU_MEMORY_TYPE_WEIGHTS in self.offload_tags:
            wrong = RELEASED
        if not wrong:
            try:
                draft.load_drafter(recv_req.model_path, recv_req.token_step)
            except HyperDFlashConfigError as error:
                wrong = str(error)
        return UpdateWeightsFromTensorReqOutput(success=not wrong, message=wrong)
    if recv_req.recapture_cuda_graph and captured(runner):
        return UpdateWeightFromDiskReqOutput(success=False, message=GRAPHS_STAY)
    return original(self, recv_req)
