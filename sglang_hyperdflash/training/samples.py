"""Training samples: tokens with answer spans, collated into batches with the target's states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from typing_extensions import Self

# The largest 64-bit prime: torch generators take 64 bits.
SEEDS = 2**64 - 59


class Tensors:
    """A dataclass of tensors that moves between devices as one."""

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

    def cut(self, length: int) -> Sample:
        """The same up to its last answer that ends within ``length`` tokens."""
        if len(self.tokens) <= length:
            return self
        spans = tuple(span for span in self.spans if span[1] <= length)
        return Sample(self.tokens[: spans[-1][1]] if spans else [], spans)

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
    """The target's states of some rows, fp32, zero in the padding.

    residual: ``[b, S, m*d]`` (pre-collapse). final: ``[b, S, d]`` (after the final norm: the true
    gated collapse). layers: ``[b, S, len(layer_ids) * d]``, the paths' means after chosen layers,
    zero columns wide when none are.
    """

    residual: torch.Tensor
    final: torch.Tensor
    layers: torch.Tensor

    @classmethod
    def without_layers(cls, residual: torch.Tensor, final: torch.Tensor) -> States:
        """States without chosen layers."""
        return cls(residual, final, residual.new_zeros(*residual.shape[:-1], 0))


class Source(Protocol):
    """A trainer's source of samples and their states."""

    samples: list[Sample]

    def states(self, indices: list[int]) -> States:
        """The target's states of the samples at ``indices``, padded like :func:`collate`."""


def generator_seed(number: int) -> int:
    """A number from a recipe's seed as ``torch.Generator`` takes it; unchanged where it fits.

    Args:
        number: of any size, at least 0.
    """
    return number % SEEDS


class Passes:
    """The samples of every step: passes over the data, each in its own order.

    A step's samples depend on its number and the seed alone.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, batch, seed
        self._drawn: tuple[int, list[int]] = (-1, [])

    def batch(self, step: int) -> list[int]:
        """Indices of the global batch of a step."""
        first = step * self.batch_size
        return [
            self._order(at // self.count)[at % self.count]
            for at in range(first, first + self.batch_size)
        ]

    def _order(self, epoch: int) -> list[int]:
        if self._drawn[0] != epoch:
            seed = generator_seed(self.seed * 1_000_003 + epoch)
            generator = torch.Generator().manual_seed(seed)
            self._drawn = (epoch, torch.randperm(self.count, generator=generator).tolist())
        return self._drawn[1]


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

    Stored in ``dtype`` (bf16 by default): ``(m + 1 + len(layer_ids)) * d`` numbers a token.
    """

    def __init__(
        self,
        target,
        samples: list[Sample],
        *,
        batch: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        layer_ids: tuple[int, ...] = (),
    ) -> None:
        self.samples = samples
        self._kept: list[tuple[torch.Tensor, ...]] = [()] * len(samples)
        for i, *states in computed(target, samples, batch, layer_ids, dtype):
            self._kept[i] = tuple(rows.clone() for rows in states)

    def states(self, indices: list[int]) -> States:
        """See :class:`Source`."""
        return States(
            *(pad_states(rows) for rows in zip(*(self._kept[i] for i in indices), strict=True))
        )


def computed(
    target,
    samples: list[Sample],
    batch: int,
    layer_ids: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A sample's index and its residual, final and layers' states ``[tokens, .]``, on the CPU.

    Samples of nearly one length run together, the shortest first.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        tokens = pad([samples[i].tokens for i in chosen])
        final, residual, layers = target.features(tokens, layer_ids)
        for row, i in enumerate(chosen):
            n = len(samples[i].tokens)
            parts = (part[row, :n].to(dtype).cpu() for part in (residual, final, layers))
            yield (i, *parts)


class OnlineFeatures:
    """The target's states, recomputed for each batch."""

    def __init__(self, target, samples: list[Sample], layer_ids: tuple[int, ...] = ()) -> None:
        self.target, self.samples, self.layer_ids = target, samples, layer_ids

    def states(self, indices: list[int]) -> States:
        """See :class:`Source`."""
        rows = collate([self.samples[i] for i in indices])
        final, residual, layers = self.target.features(rows.tokens, self.layer_ids)
        lengths = torch.tensor([len(self.samples[i].tokens) for i in indices])
        real = (torch.arange(rows.tokens.shape[1]) < lengths.unsqueeze(1)).unsqueeze(-1)
        # Clones: the target ran in inference mode, whose tensors autograd cannot save.
        real = real.to(final.device)
        return States(*((x.float() * real).clone() for x in (residual, final, layers)))


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Right-pad token rows with 0 to ``[b, S]`` int64."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def pad_states(rows: list[torch.Tensor]) -> torch.Tensor:
    """Right-pad rows ``[n, width]`` with zeros to ``[b, S, width]`` fp32."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).float()
