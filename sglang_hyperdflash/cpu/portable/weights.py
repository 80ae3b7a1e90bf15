"""A DeepSeek-V4 checkpoint's tensors into the portable core, strictly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from sglang_hyperdflash.targets.weight_names import core_name
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

NEXTN_PREFIX = "mtp.0."


def _place(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, tuple, torch.Tensor]]:
    """Yield ``(parameter, index into it, value)`` for one checkpoint tensor."""
    half = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
    expert = re.match(r"(.*\.mlp)\.(shared_experts|experts\.(\d+))\.(\w+)\.weight$", name)
    if expert:
        prefix, row = expert.group(1), -1 if expert.group(3) is None else int(expert.group(3))
        if expert.group(4) in half:
            f = tensor.shape[0]
            rows = slice(half[expert.group(4)] * f, (half[expert.group(4)] + 1) * f)
            yield f"{prefix}.gate_up", (row, rows), tensor
        else:
            yield f"{prefix}.down", (row,), tensor.transpose(0, 1)
        return
    stacked = re.match(r"(.*\.mlp)\.experts\.(gate_up|down)_proj$", name)
    if stacked:
        value = tensor if stacked.group(2) == "gate_up" else tensor.transpose(1, 2)
        yield f"{stacked.group(1)}.{stacked.group(2)}", (slice(0, len(tensor)),), value
        return
    yield name, (), tensor


def sent_in_parts(weights: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether these are weights that a trainer sends to a running server, a few tensors at a time.

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
    """Fill a core and its owner's other parameters; require every tensor, in its shape.

    Args:
        outside: checkpoint names to parameters outside the core: embedding, LM head.
        skip: name prefixes that are not part of this module (``mtp.``).
        whole: False for an update of a filled core, which may come in parts.

    Raises:
        HyperDFlashConfigError: an unknown, misshapen, missing or non-finite tensor.
    """
    parameters = dict(module.named_parameters()) | dict(outside or {})
    filled = {name: 0 for name in parameters}
    for source, tensor in weights:
        name = core_name(source)
        if name.startswith(skip) and skip:
            continue
        for target, index, value in _place(name, tensor):
            if target not in parameters:
                raise HyperDFlashConfigError(
                    f"target checkpoint: unexpected tensor {source} {tuple(tensor.shape)}."
                )
            place = parameters[target].data[index] if index else parameters[target].data
            if target.endswith(".o_a_proj"):
                value = value.view(place.shape) if value.numel() == place.numel() else value
            if place.shape != value.shape:
                raise HyperDFlashConfigError(
                    f"target checkpoint: tensor {source} has shape {tuple(value.shape)}; the "
                    f"config asks for {tuple(place.shape)}."
                )
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise HyperDFlashConfigError(
                    f"target checkpoint: tensor {source} holds NaN or infinite values."
                )
            place.copy_(value)
            filled[target] += value.numel()
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
        rows: core names to the rows ``[start, stop)`` to keep. total: rows each must have.

    Raises:
        HyperDFlashConfigError: a named tensor without ``total`` rows; a wrong tensor could
            otherwise happen to have the rows of a shard.
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


def nextn_tensors(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterable[tuple[str, torch.Tensor]]:
    """The ``mtp.0.*`` tensors under the core's names."""
    own = ("e_proj.", "h_proj.", "enorm", "hnorm", "norm.", "hc_head_")
    for name, tensor in weights:
        name = name.removeprefix("model.")
        if not name.startswith(NEXTN_PREFIX):
            continue
        name = name.removeprefix(NEXTN_PREFIX)
        if name.startswith(own):
            yield name.replace("norm.weight", "norm"), tensor
        else:
            yield f"layer.{name}", tensor
