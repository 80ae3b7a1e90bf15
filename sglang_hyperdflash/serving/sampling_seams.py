"""Hooks through which a HYPERDFLASH scheduler samples; all do nothing in any other process.

SGLang's penalties count one, possibly outdated, token a round; its sampler keys noise by rank as
soon as a request filters, and draws without a seed from a generator of the process. Ours replaces
what decides a token and leaves logprobs, grammar and masks to SGLang.
"""

from __future__ import annotations

from typing import Any

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import Seam

# The SampledWorker of this process.
_worker: Any = None


def serve(worker: Any) -> None:
    """From now on this process samples with ``worker``, a ``SampledWorker``."""
    global _worker
    _worker = worker


def worker_is_ours() -> bool:
    """Whether this process's worker is ours."""
    return _worker is not None


def _ours(runner: Any) -> bool:
    return _worker is not None and runner is _worker.target_worker.model_runner


def without_penalties(original, self, vocab_size, batch, penalizers):
    """A batch of ours has no penalizer of SGLang's: the worker has them, exact inside a block."""
    if is_ours(getattr(batch, "spec_algorithm", None)):
        penalizers = set()
    return original(self, vocab_size, batch, penalizers)


def skip_verify_adjustments(original, **inputs):
    """The worker changes a block's logits itself, after the grammar, as target-only does."""
    return None if _worker is not None else original(**inputs)


def penalise_prefill(original, self, logits_output, sampling_info, observer=None):
    """Penalties come before grammar and bias."""
    if _ours(self):
        _worker.adjust_prefill(logits_output.next_token_logits)
    if observer is None:
        return original(self, logits_output, sampling_info)
    return original(self, logits_output, sampling_info, observer=observer)


def sample_prefill(original, self, logits_output, forward_batch):
    """Count the tokens a prefill has drawn."""
    tokens = original(self, logits_output, forward_batch)
    return _worker.end_prefill(tokens) if _ours(self) else tokens


def read_final_logits(original, self, logits, sampling_info):
    """Read greedy tokens and broken rows of the logits that SGLang samples from."""
    logits = original(self, logits, sampling_info)
    if _worker is not None and _worker.requests is not None:
        _worker.read_final_logits(logits)
    return logits


def draw_prefill(original, self, probs, sampling_info, positions, simple_sampling_case):
    """Draw by hashed noise over vocabulary ids; a sampling mask holds what is drawn from.

    SGLang's own mask depends on the batchmates' min-p, and a broken row ends its draw.
    """
    if _worker is None or _worker.requests is None:
        return original(self, probs, sampling_info, positions, simple_sampling_case)
    tokens, weights = _worker.draw_prefill(probs, sampling_info, positions)
    rows = sampling_info.sampling_mask_batch_indices
    if rows is None:
        return tokens, None
    from sglang.srt.layers.sampler import _SamplingMaskCapture

    asked = weights.index_select(0, rows)
    return tokens, _SamplingMaskCapture(asked, None, selected_weight=None, batch_rows=rows)


def sampling_mask_probs(original, **inputs):
    """The distribution that ours draws from, for sampling masks: ``[bs, draft_token_num, V]``.

    SGLang takes top-p of what top-k has left; its sampler, and so ours, of the whole.
    """
    if _worker is None:
        return original(**inputs)
    logits, rows = inputs["next_token_logits"], inputs["draft_token_num"]
    return _worker.target_distribution(logits, inputs["sampling_info"], rows)


def process_results_first(disabled: bool, self, batch, last_batch) -> bool:
    """Process a round's result before the next one starts if that has a custom logit processor.

    Seam: ``Scheduler.is_disable_overlap_for_batch``, as SGLang does for grammars that need it.
    """
    info = batch.sampling_info if batch and is_ours(batch.spec_algorithm) else None
    processors = info is not None and info.has_custom_logit_processor
    return disabled or bool(processors and self.result_queue)


_NOISE = "a token is drawn by hashed noise, the same with and without speculation"

SEAMS = (
    Seam(
        "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.__init__",
        "around",
        without_penalties,
        ("self", "vocab_size", "batch", "penalizers"),
        "68677351b8de",
        "SGLang fixes penalties for a whole block",
    ),
    Seam(
        "sglang.srt.speculative.dflash_utils:apply_dflash_verify_logits_adjustments",
        "around",
        skip_verify_adjustments,
        ("next_token_logits", "sampling_info", "draft_token_num"),
        "e0263dfa657c",
        "SGLang gives every row of a block the same penalties",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits",
        "around",
        penalise_prefill,
        ("self", "logits_output", "sampling_info", "observer"),
        "091be992a929",
        "min_new_tokens and the penalties of a retracted request hold for a prefill's token",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner.sample",
        "around",
        sample_prefill,
        ("self", "logits_output", "forward_batch"),
        "524ba830a319",
        "a prefill's token counts for penalties",
    ),
    Seam(
        "sglang.srt.layers.sampler:Sampler._preprocess_logits",
        "around",
        read_final_logits,
        ("self", "logits", "sampling_info"),
        "7f9c924ec6bc",
        _NOISE,
    ),
    Seam(
        "sglang.srt.layers.sampler:Sampler._sample_from_probs",
        "around",
        draw_prefill,
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        "9ec12e2a6d1a",
        _NOISE,
    ),
    Seam(
        "sglang.srt.speculative.dflash_utils:build_speculative_verify_target_probs",
        "around",
        sampling_mask_probs,
        (
            "next_token_logits",
            "sampling_info",
            "draft_token_num",
            "bs",
            "max_top_k",
            "uniform_top_k_value",
            "use_sparse_topk",
        ),
        "4ab96a91a0fa",
        "a sampling mask holds what a token is drawn from",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch",
        "after",
        process_results_first,
        ("self", "batch", "last_batch"),
        "a6dece490f1e",
        "a custom logit processor must see every token before the one it changes",
    ),
)
