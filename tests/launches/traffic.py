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

# Arguments of a launch by name; bytes of one of them.
Arguments = Mapping[str, Any]
Rule = Callable[[Arguments], int]


def size(tensor: torch.Tensor) -> int:
    """Bytes of the different entries of a tensor; an expanded dimension has one."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.element_size()


def _entries(name: str, count: Callable[[Arguments], int]) -> tuple[str, Rule]:
    """A rule: so many entries of the argument are read, or written."""
    return name, lambda a: count(a) * a[name].element_size()


def _candidates(a: Arguments) -> int:
    """Candidates of all drafts of a batch."""
    return a["ids_ptr"].numel()


def _table_rows(a: Arguments) -> int:
    """Entries of a head's table that belong to the tokens before all drafts."""
    return a["gates_ptr"].numel()


def _adjusted_rows(a: Arguments) -> int:
    """Whole rows are read and written for penalties and bias; end tokens alone are written."""
    rows = a["block_ptr"].numel()
    whole = a["counts_ptr"] is not None or a["bias_ptr"] is not None
    return 2 * rows * a["vocabulary"] if whole else rows * a["ends"]


_HEAD = dict(
    (
        _entries("predecessor_ptr", _table_rows),
        _entries("successor_ptr", lambda a: _candidates(a) * a["RANK"]),
    )
)
# Kernel, argument, bytes. Of all other arguments: their size.
RULES: dict[str, dict[str, Rule]] = {
    "triton_ops.propose_kernel._propose_kernel": _HEAD
    | dict(
        (
            _entries("block_ptr", lambda a: len(a["ids_ptr"])),
            _entries("counts_ptr", _candidates),
            _entries("bias_ptr", _candidates),
        )
    ),
    "triton_ops.propose_kernel._greedy_kernel": _HEAD,
    "triton_ops.copy_kernel._copy_kernel": dict(
        (_entries("history_ptr", lambda a: len(a["slots_ptr"]) * a["size"]),)
    ),
    "triton_ops.adjust_kernel._adjust_kernel": dict(
        (
            _entries("logits_ptr", _adjusted_rows),
            _entries("counts_ptr", lambda a: len(a["block_ptr"]) * a["vocabulary"]),
        )
    ),
    "triton_ops.accept_kernel._accept_kernel": dict(
        (
            _entries("logits_ptr", lambda a: _candidates(a) if a["HAS_IDS"] else 0),
            _entries("kept_ptr", lambda a: _candidates(a) if a["HAS_KEPT"] else 0),
        )
    ),
    "triton_ops.finish_kernel._share_kernel": dict(
        (
            _entries("logits_ptr", lambda a: len(a["seeds_ptr"]) * a["vocabulary"]),
            _entries("kept_ptr", lambda a: len(a["seeds_ptr"]) * a["vocabulary"] * a["HAS_KEPT"]),
            _entries("ids_ptr", lambda a: len(a["seeds_ptr"]) * a["K"]),
            _entries("q_ptr", lambda a: len(a["seeds_ptr"]) * a["K"]),
        )
    ),
}


def kernel_bytes(
    kernel: str, arguments: Arguments, rules: Mapping[str, Mapping[str, Rule]] = RULES
) -> int:
    """What one launch reads and writes.

    Args:
        kernel: its module and name, as in ``RULES``.
        arguments: all of the launch, by name; a tensor that stands for an absent one counts once.
    """
    own, seen, total = rules.get(kernel, {}), set(), 0
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in own:
            total += own[name](arguments)
        elif id(value) not in seen:
            seen.add(id(value))
            total += size(value)
    return total
