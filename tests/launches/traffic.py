"""Bytes that one launch of a kernel moves to and from device memory, from its arguments alone.

A tensor argument counts once, whole, however often it is read: later reads hit the L2 cache. What a
kernel gathers from a larger tensor, and what it both reads and writes, is in :data:`RULES`. Sizes
that depend on values are the largest possible: every request draws, and every request has penalties
where one has. ``make launches`` divides by a bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Of a launch: all arguments by name, to how many entries of one of them it reads or writes.
Rule = Callable[[Mapping[str, Any]], int]


def size(tensor: torch.Tensor) -> int:
    """Bytes of the different entries of a tensor; an expanded dimension has one."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.element_size()


def _adjusted(a: Mapping[str, Any]) -> int:
    """Whole rows are read and written for penalties and bias; end tokens alone are written."""
    rows = a["block_ptr"].numel()
    whole = a["counts_ptr"] is not None or a["bias_ptr"] is not None
    return 2 * rows * a["vocabulary"] if whole else rows * a["ends"]


def _candidates(a: Mapping[str, Any]) -> int:
    """Of all drafts of a batch."""
    return a["ids_ptr"].numel()


# Of a head's tables, what belongs to the tokens before all drafts and to their candidates.
_HEAD: dict[str, Rule] = {
    "predecessor_ptr": lambda a: a["gates_ptr"].numel(),
    "successor_ptr": lambda a: _candidates(a) * a["RANK"],
}
# Kernel, argument, entries. Of all other arguments: their own.
RULES: dict[str, dict[str, Rule]] = {
    "triton_ops.propose_kernel._propose_kernel": {
        **_HEAD,
        "block_ptr": lambda a: len(a["ids_ptr"]),
        "counts_ptr": _candidates,
        "bias_ptr": _candidates,
    },
    "triton_ops.propose_kernel._greedy_kernel": _HEAD,
    "triton_ops.copy_kernel._copy_kernel": {
        "history_ptr": lambda a: len(a["slots_ptr"]) * a["size"]
    },
    "triton_ops.adjust_kernel._adjust_kernel": {
        "logits_ptr": _adjusted,
        "counts_ptr": lambda a: len(a["block_ptr"]) * a["vocabulary"],
    },
    "triton_ops.accept_kernel._accept_kernel": {
        "logits_ptr": lambda a: a["HAS_IDS"] and _candidates(a),
        "kept_ptr": lambda a: a["HAS_KEPT"] and _candidates(a),
    },
    "triton_ops.finish_kernel._share_kernel": {
        "logits_ptr": lambda a: len(a["seeds_ptr"]) * a["vocabulary"],
        "kept_ptr": lambda a: a["HAS_KEPT"] and len(a["seeds_ptr"]) * a["vocabulary"],
        "ids_ptr": lambda a: len(a["seeds_ptr"]) * a["K"],
        "q_ptr": lambda a: len(a["seeds_ptr"]) * a["K"],
    },
    # SGLang's reads a few entries of a large table.
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_uniform": {
        "req_to_token": lambda a: a["out_cache_loc"].numel()
    },
}


def kernel_bytes(kernel: str, arguments: Mapping[str, Any]) -> int:
    """What one launch reads and writes.

    Args:
        kernel: its module and name, as in ``RULES``.
        arguments: all of the launch, by name; a tensor that stands for an absent one counts once.
    """
    rules, seen, total = RULES.get(kernel, {}), set(), 0
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in rules:
            total += rules[name](arguments) * value.element_size()
        elif id(value) not in seen:
            seen.add(id(value))
            total += size(value)
    return total
