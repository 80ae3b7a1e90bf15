"""The SGLang draft model: SGLang's DFlash layers after the HyperDFlash reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch
from sglang.srt.models.dflash import DFlashDraftModel

from sglang_hyperdflash.draft.checkpoint import checked_tensors, expected_tensors
from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.draft.dependency import build_dependency
from sglang_hyperdflash.draft.reducer import build_reducer
from sglang_hyperdflash.serving.scheduler.weight_updates import QUANTIZED, REFUSAL


class HyperDFlashDraftModel(DFlashDraftModel):
    """DFlash layers whose context feature is the reduced pre-collapse residual.

    Seam: ``DFlashWorkerV2`` calls ``project_target_hidden`` on the target's hidden states before
    every write of draft K/V, outside the CUDA graphs.

    Attributes:
        replacing: the context in which weights are replaced while rounds run. The worker sets it;
            None until it serves.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        self.raw_config = config.to_dict()
        parsed = parse_config(self.raw_config)
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self.hyperdflash_config = parsed
        del self.fc  # sized for captured layers; ours follows the config's source
        self.reducer_name, reducer = build_reducer(parsed)
        setattr(self, self.reducer_name, reducer)
        self.dependency = build_dependency(parsed)
        if self.dependency is not None:
            self.dependency.requires_grad_(False)
        self.replacing: Callable[[], AbstractContextManager] | None = None
        if quant_config is not None:
            setattr(self, REFUSAL, QUANTIZED)

    @property
    def reducer_module(self) -> torch.nn.Module:
        """The reducer under its checkpoint name."""
        return getattr(self, self.reducer_name)

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """What the target gave to context features ``[N, d]`` (eq. 1).

        Args:
            target_hidden: the pre-collapse residual ``[N, m * d]``, or, with source ``layers``,
                the chosen layers' means ``[N, len(ids) * d]``.
        """
        return self.reducer_module(target_hidden, self.hidden_norm.weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load exactly the tensors the config describes; anything else is an error.

        While the drafter serves, some of them are enough, and all are checked before the first is
        replaced. Seam: ``WeightUpdater``, with the draft selected.

        Raises:
            HyperDFlashConfigError: a tensor that does not fit.
        """
        expected = expected_tensors(self.raw_config, self.hyperdflash_config)
        if self.replacing is None:
            super().load_weights(checked_tensors(weights, expected))
        else:
            self.replace_weights(dict(checked_tensors(weights, expected, whole=False)))

    def replace_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights in place between two rounds; they were checked before."""
        with self.replacing():
            super().load_weights(tensors.items())
