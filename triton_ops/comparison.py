"""Comparison of kernels with their references, for all calls within a :class:`Comparison`.

Two implementations round differently, so they may choose different tokens in a near-tie. An entry
that differs counts only if the reference keeps it when its inputs change by 2e-6 of their size.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from sglang_hyperdflash.tools.errors import HyperDFlashError
from triton_ops import operator
from triton_ops.operator import Operator

# Tolerances relative to an entry and to its tensor's largest below HUGE, which means impossible.
RELATIVE, ABSOLUTE, HUGE = 1e-4, 1e-5, 1e20
PERTURBED_BY, PERTURBATIONS = 2e-6, 4
Results = dict[str, torch.Tensor]


class Comparison:
    """A context in which operators run both implementations and return the reference's results.

    Attributes:
        batches: the number of calls of each operator.
        wrong: the first difference of each operator that has one.
        exact: whether every difference counts: inputs with exact ties have no near-ties.
    """

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}
        self.exact = False

    def __enter__(self) -> Comparison:
        operator.interceptor = self.compare
        return self

    def __exit__(self, *_: Any) -> None:
        operator.interceptor = None

    def compare(self, op: Operator, arguments: tuple) -> Any:
        """Run both implementations; the kernel gets the caller's tensors, not copies."""
        if op.uses_reference:
            return op.exactly(*arguments)
        self.batches[op.name] += 1
        before, changed = cloned(arguments), cloned(arguments)
        expected = op.exactly(*changed)
        results = results_by_name(expected, changed)
        try:
            difference = self.difference(op, arguments, before, results)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler or the launch, of any kind
            difference = f"{type(error).__name__}: {str(error)[:500]}"
            refuse_lost_device(op, difference)
        if difference is not None:
            self.wrong.setdefault(op.name, difference)
            pairs = zip(tensor_arguments(arguments), tensor_arguments(changed), strict=True)
            for argument, value in pairs:
                if not torch.equal(argument, value):
                    argument.copy_(value)
        return expected

    def difference(
        self, op: Operator, arguments: tuple, before: tuple, expected: Results
    ) -> str | None:
        """Launch the kernel, which may change ``arguments``, and describe the first difference.

        Args:
            before: copies of the arguments, for other runs of the reference.
        """
        results = results_by_name(op.launch(*arguments), arguments)
        for name, result in results.items():
            wanted = expected[name].dtype, tuple(expected[name].shape)
            if (result.dtype, tuple(result.shape)) != wanted:
                shape = tuple(result.shape)
                return f"{name} is {result.dtype} {shape}, expected {wanted[0]} {wanted[1]}"
        wrong = differing(op, before, results, expected)
        near_ties = not self.exact and any(map(torch.any, wrong.values()))
        for turn in range(PERTURBATIONS if near_ties else 0):
            again = perturbed(before, turn)
            for name, result in results_by_name(op.exactly(*again), again).items():
                wrong[name] &= ~mismatches(result, expected[name])
        for name, entries in wrong.items():
            if entries.any():
                return largest_difference(name, results[name], expected[name], entries)
        return None


def refuse_lost_device(op: Operator, difference: str) -> None:
    """Raise ``HyperDFlashError`` if the kernel made an illegal access, which ends its process."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise HyperDFlashError(
            f"the kernel of {op.name} ends the use of this GPU ({difference}). Start again with "
            f"{operator.OPERATORS_VARIABLE}={op.name}, and report it."
        ) from error


def differing(op: Operator, before: tuple, results: Results, expected: Results) -> Results:
    """Return which entries of each result count as different; ``before`` are the arguments."""
    wrong = {name: mismatches(result, expected[name]) for name, result in results.items()}
    if op.name == "row_statistics":  # sums of greedy requests are arbitrary
        greedy = (before[2] <= 1).repeat_interleave(before[5].shape[1])
        for name in ("result 1", "result 2"):
            wrong[name] &= ~greedy | expected[name].isnan()
    return wrong


def mismatches(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return which entries differ by more than rounding; NaN equals NaN."""
    if not expected.is_floating_point() or torch.equal(result, expected):
        return result != expected
    sizes = expected.double().abs()
    counted = sizes[sizes < HUGE]
    limit = max(RELATIVE, 1.5 * torch.finfo(expected.dtype).eps) * sizes
    if counted.numel():
        limit += ABSOLUTE * counted.max()
    near = (result.double() - expected.double()).abs() <= limit
    return ~(near | (result == expected) | (result.isnan() & expected.isnan()))


def largest_difference(
    name: str, result: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor
) -> str:
    """Describe the largest difference among the ``wrong`` entries."""
    sizes = (result.double() - expected.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    flat = int(sizes.masked_fill(~wrong, -1.0).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), result.shape)]
    values = result.flatten()[flat].item(), expected.flatten()[flat].item()
    share = f"{int(wrong.sum())} of {wrong.numel()} entries differ"
    return f"{name}{index} is {values[0]:.9g}, expected {values[1]:.9g}; {share}"


def results_by_name(results: Any, arguments: tuple) -> Results:
    """Return an operator's results and tensor arguments, which it may write, by number."""
    results = results if isinstance(results, tuple) else (results,)
    by_name = {f"result {i}": t for i, t in enumerate(results) if t is not None}
    return by_name | {f"argument {i}": t for i, t in enumerate(tensor_arguments(arguments))}


def tensor_arguments(arguments: tuple) -> list[torch.Tensor]:
    """Return the tensors among some arguments."""
    return [a for a in arguments if isinstance(a, torch.Tensor)]


def cloned(arguments: tuple) -> tuple:
    """Return copies of the tensors among some arguments, and the other arguments."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)


def perturbed(arguments: tuple, turn: int) -> tuple:
    """Return copies whose floating-point numbers are randomly larger or smaller by a little."""
    generator = torch.Generator().manual_seed(turn)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.clone()
        noise = torch.rand(value.shape, generator=generator).to(value.device) * 2 - 1
        return (value.double() * (1 + PERTURBED_BY * noise)).to(value.dtype)

    return tuple(map(moved, arguments))
