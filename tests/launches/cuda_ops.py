"""What an operation of torch costs on CUDA: kernels launched, bytes moved, waits for the device.

Read from torch 2.14's CUDA sources (``aten/src/ATen/native/cuda``). An operation that is not named
here is one kernel which reads its arguments and writes its results once. Only an accumulating
``index_put`` and ``topk`` are estimates: their number of launches depends on the size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.launches.traffic import size

# No kernel: memory is reserved, or a tensor looks at another's.
FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh"),
    *("detach", "alias", "_unsafe_view", "_reshape_alias", "set_", "resize_"),
}
# As many entries are written as there are indices.
SCATTERS = {"index_put", "index_copy", "index_add", "index_fill", "scatter", "scatter_add"}
# More than one kernel. Functional forms of what exists in place copy first; a sort of up to 4096
# entries copies values, fills indices, and sorts both.
SEVERAL = dict.fromkeys((*SCATTERS, "masked_fill", "topk"), 2) | {"sort": 3}
# ``index_put`` that adds: a linear index of each entry, a radix sort, and one kernel at last.
ACCUMULATE = 9
# The result's entries are read of the first argument, not all of it.
GATHERS = {"gather", "index_select", "index", "embedding", "take"}
# What was there before is not read.
OVERWRITES = {"copy_", "fill_", "zero_"}


def tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def name_of(func: Any) -> str:
    """``add_`` of ``aten.add_.Tensor``."""
    return func._schema.name.partition("::")[2]


def is_view(func: Any) -> bool:
    """Whether the results look at an argument's memory, and nothing is written."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def waits(func: Any, args: tuple) -> bool:
    """Whether the host waits where a fake tensor knows its result all the same."""
    name = name_of(func)
    if name.rstrip("_") != "index_put":
        return name == "histc"
    masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
    if len(args[1]) == 1 and masks:
        # A scalar of the host: torch fills by the mask, and counts nothing.
        value, accumulate = args[2], len(args) > 3 and args[3]
        return accumulate or value.numel() != 1 or value.device.type != "cpu"
    return bool(masks)


def launches(func: Any, args: tuple) -> int:
    name = name_of(func)
    if name in FREE or is_view(func):
        return 0
    count = SEVERAL.get(name, 1)
    if name in ("cumsum", "cumprod") and args[0].ndim == 1:
        count += 1  # a scan of one long row has a state to set up
    if name.rstrip("_") == "index_put" and len(args) > 3 and args[3]:
        count += ACCUMULATE
    return count


def moved(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    name, written = name_of(func), sum(map(size, _different(result)))
    if name.endswith("_like") or name.startswith("new_"):
        return written
    given = list(args)
    if name.rstrip("_") in SCATTERS:
        index = sum(map(size, tensors(given[1:])))
        entries = max(t.numel() for t in tensors(given[1:])) * given[0].element_size()
        copied = 0 if name.endswith("_") else 2 * size(given[0])
        added = 2 if "add" in name or (len(given) > 3 and given[3] is True) else 1
        return index + added * entries + copied
    if name in GATHERS:
        return 2 * written + sum(map(size, _different(given[1:])))
    if name in OVERWRITES:
        given = given[1:]
    read = {k: v for k, v in kwargs.items() if k != "out"}
    return written + sum(map(size, _different([given, read])))


def _different(values: Any) -> list[torch.Tensor]:
    """The tensors among values, each once; host scalars travel with the launch."""
    return list({id(t): t for t in tensors(values) if t.is_cuda}.values())
