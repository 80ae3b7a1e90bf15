"""Training samples: tokens with answer spans, collated into batches with the target's states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Protocol, Self

import torch

from sglang_hyperdflash.training.recipe import pass_samples

# The largest 64-bit prime: torch generators take 64 bits.
SEEDS = 2**64 - 59


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device``, for which the host does not wait."""
    if device.type == "cuda" and torch.cuda.is_available() and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Tensors:
    """A dataclass of tensors that moves between devices as one."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(*(moved(getattr(self, f.name), device) for f in fields(self)))

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


@dataclass(frozen=True)
class Sample:
    """Tokens of a conversation and the spans ``[start, end)`` that the target answered.

    The tokens of a store's samples are a tensor, int32.
    """

    tokens: list[int] | torch.Tensor
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

    def after(self, first: int) -> Sample:
        """The same from token ``first`` on, which is none after its first answer's begin."""
        spans = tuple((start - first, end - first) for start, end in self.spans)
        return Sample(self.tokens[first:], spans)

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
    """The target's states of some rows, zero in the padding, in the dtype that they are kept in.

    residual: ``[b, S, m*d]``, before the collapse. layers: ``[b, S, len(layer_ids) * d]``, the
    paths' means after chosen layers, zero columns wide when none are.
    """

    residual: torch.Tensor
    layers: torch.Tensor

    @classmethod
    def without_layers(cls, residual: torch.Tensor) -> States:
        """States without chosen layers."""
        return cls(residual, residual.new_zeros(*residual.shape[:-1], 0))

    def to(self, device: torch.device) -> Self:
        """On the device that computes with them, in fp32."""
        moved = super().to(device)
        return type(self)(moved.residual.float(), moved.layers.float())


class Source(Protocol):
    """A trainer's source of samples and their states.

    Attributes:
        lengths, answers: tokens of every sample, and those that are answers, int64.
        counts: samples of every place that they come from.
    """

    samples: Sequence[Sample]
    lengths: torch.Tensor
    answers: torch.Tensor
    counts: Sequence[int]

    def prefetch(self, indices: list[int]) -> None:
        """Begin to read what :meth:`states` will be asked for, if that takes time."""

    def states(self, indices: list[int]) -> States:
        """The target's states of the samples at ``indices``, padded like :func:`collate`."""


class InMemory:
    """A :class:`Source` whose samples are in memory."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.lengths = torch.tensor([len(sample.tokens) for sample in samples])
        self.answers = torch.tensor([sample.answer_tokens for sample in samples])
        self.counts = [len(samples)]

    def prefetch(self, indices: list[int]) -> None:
        """There is nothing to wait for."""


def generator_seed(number: int) -> int:
    """A number from a recipe's seed as ``torch.Generator`` takes it; unchanged where it fits.

    Args:
        number: of any size, at least 0.
    """
    return number % SEEDS


class Passes:
    """The samples of every step: passes over the data, each in its own order.

    A step's samples depend on its number and the seed alone. Batches mix lengths: those of one
    length would each hold one kind of text, and cost accept length.

    Args:
        counts: samples of every source, which come one after another.
        weights: of every source, how often a pass takes each of its samples, on average; 1 for all
            where it is empty.
        first: the step that takes the first samples.
    """

    def __init__(
        self,
        counts: Sequence[int],
        batch: int,
        seed: int,
        weights: Sequence[float] = (),
        first: int = 0,
    ) -> None:
        self.counts, self.batch_size, self.seed, self.first = counts, batch, seed, first
        self.weights = weights or [1.0] * len(counts)
        self.count = pass_samples(counts, weights)
        self._order = lru_cache(2)(self._drawn)

    def batch(self, step: int) -> list[int]:
        """Indices of the global batch of a step."""
        first = (step - self.first) * self.batch_size
        return [
            self._order(at // self.count)[at % self.count]
            for at in range(first, first + self.batch_size)
        ]

    def _drawn(self, epoch: int) -> list[int]:
        seed = generator_seed(self.seed * 1_000_003 + epoch)
        generator = torch.Generator().manual_seed(seed)
        chosen, first = [], 0
        for count, weight in zip(self.counts, self.weights, strict=True):
            whole, rest = divmod(round(count * weight), max(count, 1))
            parts = [torch.arange(count)] * whole
            if rest:  # others in every pass
                parts.append(torch.randperm(count, generator=generator)[:rest])
            chosen += [first + part for part in parts]
            first += count
        drawn = torch.cat(chosen)
        return drawn[torch.randperm(len(drawn), generator=generator)].tolist()


def collate(samples: Sequence[Sample]) -> Rows:
    """Right-pad samples; padding is outside the loss mask."""
    tokens = pad([sample.tokens for sample in samples])
    loss_mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        for start, end in sample.spans:
            loss_mask[row, start:end] = True
    return Rows(tokens, loss_mask)


def computed(
    target,
    samples: Sequence[Sample],
    batch: int,
    layer_ids: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """A sample's index and its residual and layers' states ``[tokens, .]``, on the CPU.

    Samples of nearly one length run together, the shortest first.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        tokens = pad([samples[i].tokens for i in chosen])
        _, residual, layers = target.features(tokens, layer_ids)
        for row, i in enumerate(chosen):
            n = len(samples[i].tokens)
            parts = (part[row, :n].to(dtype).cpu() for part in (residual, layers))
            yield (i, *parts)


class OnlineFeatures(InMemory):
    """The target's states, recomputed for each batch."""

    def __init__(self, target, samples: list[Sample], layer_ids: tuple[int, ...] = ()) -> None:
        super().__init__(samples)
        self.target, self.layer_ids = target, layer_ids

    def states(self, indices: list[int]) -> States:
        """See :class:`Source`."""
        rows = collate([self.samples[i] for i in indices])
        _, residual, layers = self.target.features(rows.tokens, self.layer_ids)
        real = torch.arange(rows.tokens.shape[1]) < self.lengths[indices].unsqueeze(1)
        real = real.unsqueeze(-1).to(residual.device)
        # Clones: the target ran in inference mode, whose tensors autograd cannot save.
        return States(*((x.float() * real).clone() for x in (residual, layers)))


def pad(rows: Sequence[Sequence[int] | torch.Tensor]) -> torch.Tensor:
    """Right-pad token rows with 0 to ``[b, S]`` int64."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row)
    return out
