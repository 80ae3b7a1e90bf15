"""Training samples: tokens with answer spans, collated into batches with the target's states."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from typing_extensions import Self


class Tensors:
    """A dataclass of tensors that moves as one."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True)
class Sample:
    """Tokens of a conversation and the spans ``[start, end)`` that the target answered."""

    tokens: list[int]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def continuation(cls, tokens: list[int], prompt_length: int) -> Sample:
        """A prompt and one answer that runs to the end."""
        return cls(tokens, ((prompt_length, len(tokens)),))

    @property
    def answer_tokens(self) -> int:
        """Tokens inside the spans."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Rows(Tensors):
    """Padded samples: tokens ``[b, S]`` int64 and loss_mask ``[b, S]`` bool (answer tokens)."""

    tokens: torch.Tensor
    loss_mask: torch.Tensor


@dataclass(frozen=True)
class States(Tensors):
    """The target's states of some rows: residual ``[b, S, m*d]`` (pre-collapse) and final
    ``[b, S, d]`` (after the final norm: the true gated collapse), fp32, zero in the padding."""

    residual: torch.Tensor
    final: torch.Tensor


class Source(Protocol):
    """Where a trainer gets samples and their states from."""

    samples: list[Sample]

    def states(self, indices: list[int]) -> States:
        """The target's states of the samples at ``indices``, padded like :func:`collate`."""


def collate(samples: list[Sample]) -> Rows:
    """Right-pad samples; padding is outside the loss mask."""
    tokens = pad([sample.tokens for sample in samples])
    loss_mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        for start, end in sample.spans:
            loss_mask[row, start:end] = True
    return Rows(tokens, loss_mask)


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
            final, residual = target.features(pad([samples[i].tokens for i in chosen]))
            for row, i in enumerate(chosen):
                n = len(samples[i].tokens)
                self.final[i] = final[row, :n].to(dtype).cpu().clone()
                self.residual[i] = residual[row, :n].to(dtype).cpu().clone()

    def states(self, indices: list[int]) -> States:
        """See :class:`Source`."""
        return States(
            _pad_states([self.residual[i] for i in indices]),
            _pad_states([self.final[i] for i in indices]),
        )


class OnlineFeatures:
    """The target's states computed for each batch anew: nothing is kept."""

    def __init__(self, target, samples: list[Sample]) -> None:
        self.target, self.samples = target, samples

    def states(self, indices: list[int]) -> States:
        """See :class:`Source`."""
        rows = collate([self.samples[i] for i in indices])
        final, residual = self.target.features(rows.tokens)
        lengths = torch.tensor([len(self.samples[i].tokens) for i in indices])
        real = (torch.arange(rows.tokens.shape[1]) < lengths.unsqueeze(1)).unsqueeze(-1)
        # Clones: the target ran in inference mode, whose tensors autograd cannot save.
        real = real.to(final.device)
        return States((residual.float() * real).clone(), (final.float() * real).clone())


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Right-pad token rows with 0 to ``[b, S]`` int64."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def _pad_states(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).float()
