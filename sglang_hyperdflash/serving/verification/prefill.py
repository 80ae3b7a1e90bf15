"""A prefill's token, through SGLang's own sampler: what decides it is ours, the same as a round's.

SGLang's penalties count one, possibly outdated, token a round; its sampler keys noise by rank as
soon as a request filters, and draws without a seed from a generator of the process. These hooks
replace what decides a token and leave logprobs, grammar and masks to SGLang. They do nothing in a
process without a HYPERDFLASH worker.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.draft.adjust import adjust_rows
from sglang_hyperdflash.seams import after, around
from sglang_hyperdflash.serving.verification.exact import lay_out_rows

# The PrefillSampler of this process.
_sampler: PrefillSampler | None = None


class PrefillSampler:
    """One row a request: penalties, final logits and the draw, as in a round of width 1.

    Args:
        request_state: knows the pass that runs. verifier: filters, draws.
    """

    def __init__(self, runner: Any, request_state: Any, verifier: Any) -> None:
        self.runner, self.request_state, self.verifier = runner, request_state, verifier
        self._logits: torch.Tensor | None = None
        self._broken: torch.Tensor | None = None

    def penalise(self, logits: torch.Tensor) -> None:
        """Penalties of ``logits [bs, V]``, in place, before grammar and bias."""
        requests = self.request_state.current
        changes = requests.changes(bias=False)
        if changes is not None:
            last = (requests.lengths.long() - 1).unsqueeze(1)
            adjust_rows(logits.unsqueeze(1), last, last, *changes.tensors)

    def read(self, logits: torch.Tensor, sampled: bool) -> None:
        """Keep which final rows ``[bs, V]`` are broken and, if anyone samples, all of them."""
        self._broken = ~logits.amax(-1).isfinite()
        # SGLang's sampler writes its probabilities over them.
        self._logits = logits.clone() if sampled else None

    def draw(
        self, probs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[bs]`` of a batch with a sampled request, and the weights that they are from."""
        requests = self.request_state.current
        tokens, weights = self.verifier.draw_prefill(self._logits, probs, positions, requests)
        # SGLang looks the token of a broken row up, too.
        return tokens.clamp(max=self._logits.shape[-1] - 1), weights

    def end(self, tokens: torch.Tensor) -> torch.Tensor:
        """Count a prefill's ``tokens [bs]``; past the vocabulary where the row was broken."""
        if self._broken is not None:
            tokens = tokens.masked_fill(self._broken, self.verifier.vocabulary)
        self._broken = self._logits = None
        ones = torch.ones_like(tokens)
        self.request_state.count(self.request_state.current, tokens.long().unsqueeze(1), ones)
        return tokens


def install(sampler: PrefillSampler) -> None:
    """From now on this process's prefills sample with ``sampler``."""
    global _sampler
    _sampler = sampler


def worker_is_ours() -> bool:
    """Whether this process has a HYPERDFLASH worker."""
    return _sampler is not None


def _samples(runner: Any = None) -> bool:
    """Whether ours decides the tokens of the pass that runs, of this runner if one is named."""
    ours = _sampler is not None and runner in (None, _sampler.runner)
    return ours and _sampler.request_state.current is not None


@around(
    "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.__init__",
    "1cc29c6b4742",
)
def without_penalties(original, self, vocab_size, batch, penalizers):
    """A batch of ours has no penalizer of SGLang's: ours are exact inside a block."""
    if is_ours(getattr(batch, "spec_algorithm", None)):
        penalizers = set()
    return original(self, vocab_size, batch, penalizers)


@around("sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits", "26580ccf84f3")
def penalise_prefill(original, self, logits_output, sampling_info, observer=None):
    """Apply a prefill's penalties and ``min_new_tokens`` before grammar and bias."""
    if _samples(self):
        lay_out_rows(logits_output)
        _sampler.penalise(logits_output.next_token_logits)
    if observer is None:
        return original(self, logits_output, sampling_info)
    return original(self, logits_output, sampling_info, observer=observer)


@around("sglang.srt.model_executor.model_runner:ModelRunner.sample", "ee4f0890d19d")
def sample_prefill(original, self, logits_output, forward_batch):
    """Count the tokens a prefill has drawn, for later penalties."""
    tokens = original(self, logits_output, forward_batch)
    return _sampler.end(tokens) if _samples(self) else tokens


@around("sglang.srt.layers.sampler:Sampler._preprocess_logits", "510aab35bf49")
def read_final_logits(original, self, logits, sampling_info):
    """Read the logits that SGLang samples from."""
    logits = original(self, logits, sampling_info)
    if _samples():
        _sampler.read(logits, sampled=not sampling_info.is_all_greedy)
    return logits


@around("sglang.srt.layers.sampler:Sampler._sample_from_probs", "c90023f0fa9c")
def draw_prefill(original, self, probs, sampling_info, positions, simple_sampling_case):
    """Draw by hashed noise over vocabulary ids, as without speculation.

    A sampling mask gets the distribution that is drawn from.
    SGLang's own distribution of a mask depends on the other requests' min-p.
    """
    if not _samples():
        return original(self, probs, sampling_info, positions, simple_sampling_case)
    tokens, weights = _sampler.draw(probs, positions)
    rows = sampling_info.sampling_mask_batch_indices
    if rows is None:
        return tokens, None
    from sglang.srt.layers.sampler import _SamplingMaskCapture

    asked = weights.index_select(0, rows)
    return tokens, _SamplingMaskCapture(asked, None, selected_weight=None, batch_rows=rows)


@after("sglang.srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch", "9d2b6455eb40")
def process_results_first(disabled: bool, self, batch, last_batch) -> bool:
    """Process a round's result before the next one starts if that has a custom logit processor.

    It must see every token before the one it changes. SGLang does so for grammars that need it.
    """
    info = batch.sampling_info if batch and is_ours(batch.spec_algorithm) else None
    processors = info is not None and info.has_custom_logit_processor
    return disabled or bool(processors and self.result_queue)
