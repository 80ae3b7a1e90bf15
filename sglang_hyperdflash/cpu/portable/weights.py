"""Strict loading of a DeepSeek-V4 checkpoint's tensors into the portable core."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from sglang_hyperdflash.targets.weight_names import core_name
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def _destination(name: str, tensor: torch.Tensor) -> tuple[str, tuple, torch.Tensor]:
    """Return the parameter, the index into it and the value of one checkpoint tensor."""
    half = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
    expert = re.match(r"(.*\.mlp)\.(?:shared_experts|experts\.(\d+))\.(\w+)\.weight$", name)
    if expert:
        prefix, number, projection = expert.groups()
        row = -1 if number is None else int(number)
        if projection not in half:
            return f"{prefix}.down", (row,), tensor.transpose(0, 1)
        first = half[projection] * len(tensor)
        return f"{prefix}.gate_up", (row, slice(first, first + len(tensor))), tensor
    stacked = re.match(r"(.*\.mlp)\.experts\.(gate_up|down)_proj$", name)
    if stacked:
        value = tensor if stacked.group(2) == "gate_up" else tensor.transpose(1, 2)
        return f"{stacked.group(1)}.{stacked.group(2)}", (slice(0, len(tensor)),), value
    return name, (), tensor


def sent_in_parts(weights: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether a trainer sends these weights to a running server, a few tensors at a time.

    Seam: ``WeightUpdater`` passes such tensors as a list, and a checkpoint's files as an iterator.
    """
    return isinstance(weights, list)


@torch.no_grad()
def load_core(
    module: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    outside: Mapping[str, torch.Tensor] | None = None,
    skip: tuple[str, ...] = (),
    whole: bool = True,
) -> None:
    """Fill the parameters of a core and those outside it, and check every tensor.

    Args:
        outside: the parameters outside the core (embedding, LM head) by checkpoint name.
        skip: prefixes of names that are not part of this module (``mtp.``).
        whole: False for an update of a filled core, which may come in parts.

    Raises:
        HyperDFlashConfigError: a tensor is unknown, misshapen, missing or not finite.
    """
    parameters = dict(module.named_parameters()) | dict(outside or {})
    filled = {name: 0 for name in parameters}
    for source, tensor in weights:
        name = core_name(source)
        if name.startswith(skip):
            continue
        parameter, index, value = _destination(name, tensor)
        if parameter not in parameters:
            raise HyperDFlashConfigError(
                f"target checkpoint: unexpected tensor {source} {tuple(tensor.shape)}."
            )
        entries = parameters[parameter].data[index]
        if parameter.endswith(".o_a_proj") and value.numel() == entries.numel():
            value = value.view(entries.shape)
        if entries.shape != value.shape:
            raise HyperDFlashConfigError(
                f"target checkpoint: tensor {source} has shape {tuple(value.shape)}; the "
                f"config asks for {tuple(entries.shape)}."
            )
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise HyperDFlashConfigError(
                f"target checkpoint: tensor {source} holds NaN or infinite values."
            )
        entries.copy_(value)
        filled[parameter] += value.numel()
    missing = [name for name, count in filled.items() if count != parameters[name].numel()]
    if missing and whole:
        raise HyperDFlashConfigError(
            f"target checkpoint: missing tensors for {', '.join(sorted(missing)[:8])}"
            f"{' ...' if len(missing) > 8 else ''}."
        )


def shard_rows(
    weights: Iterable[tuple[str, torch.Tensor]], rows: Mapping[str, slice], *, total: int
) -> Iterable[tuple[str, torch.Tensor]]:
    """Cut the tensors named in ``rows`` to one rank's rows; pass all others on.

    Args:
        rows: the rows ``[start, stop)`` to keep, by name in the core's scheme.
        total: the rows that each named tensor must have before it is cut.

    Raises:
        HyperDFlashConfigError: a named tensor does not have ``total`` rows.
    """
    for source, tensor in weights:
        name = core_name(source)
        if name in rows:
            if tensor.dim() != 2 or len(tensor) != total:
                raise HyperDFlashConfigError(
                    f"target checkpoint: tensor {source} has shape {tuple(tensor.shape)}; the "
                    f"config asks for {total} rows."
                )
            tensor = tensor[rows[name]]
        yield source, tensor
