"""Training samples: token rows with an answer mask, padded into batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's own continuation of it."""

    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Batch:
    """Padded samples with the target's states.

    tokens ``[b, S]``, loss_mask ``[b, S]`` bool (answer tokens), residual ``[b, S, m*d]``
    (pre-collapse), final ``[b, S, d]`` (final-norm state, the true gated collapse).
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    residual: torch.Tensor
    final: torch.Tensor


class FeatureCache:
    """The target's states of every sample, computed once and kept in memory.

    Stored in ``dtype`` (bf16 by default): ``(m + 1) * d`` numbers a token.
    """

    def __init__(
        self, target, samples: list[Sample], *, batch: int = 32, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.samples = samples
        self.residual: list[torch.Tensor | None] = [None] * len(samples)
        self.final: list[torch.Tensor | None] = [None] * len(samples)
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            tokens = pad([samples[i].tokens for i in chosen])
            final, residual = target.features(tokens)
            for row, i in enumerate(chosen):
                n = len(samples[i].tokens)
                self.final[i] = final[row, :n].to(dtype).clone()
                self.residual[i] = residual[row, :n].to(dtype).clone()

    def batch(self, indices: list[int]) -> Batch:
        """Collate samples; padding rows are zero and outside the loss mask."""
        tokens = pad([self.samples[i].tokens for i in indices])
        loss_mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, i in enumerate(indices):
            sample = self.samples[i]
            loss_mask[row, sample.prompt_length : len(sample.tokens)] = True
        return Batch(
            tokens,
            loss_mask,
            _pad_states([self.residual[i] for i in indices]),
            _pad_states([self.final[i] for i in indices]),
        )


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Right-pad token rows with 0 to ``[b, S]`` int64."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def _pad_states(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).float()
