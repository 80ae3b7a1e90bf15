"""The drafter's safetensors, looked at before any model is loaded: headers and sizes, no data.

Values are checked when the drafter is loaded (``draft.checkpoint.checked_tensors``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from sglang_hyperdflash.draft.checkpoint import check_names, expected_tensors
from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.targets.files import DTYPES, read_header
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

AGAIN = "Copy the drafter again, or export it again."


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a file that is as long as its header says."""
    with path.open("rb") as file:
        table, start = read_header(file, f"the drafter's {path}")
    end = 0
    for name, entry in table.items():
        try:
            dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            plain = dtype in DTYPES
            fits = plain and stop - begin == prod(shape) * DTYPES[dtype].itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise HyperDFlashConfigError(
                f"the drafter's {path} has a damaged header at tensor {name}. {AGAIN}"
            ) from error
        if not fits:
            raise HyperDFlashConfigError(
                f"the drafter's {path}: expected tensor {name} in one of {', '.join(DTYPES)} with "
                f"as many bytes as its shape needs; found {dtype} {shape} in {stop - begin}. "
                f"{AGAIN}"
            )
        end = max(end, stop)
    size = path.stat().st_size
    if size != start + end:
        raise HyperDFlashConfigError(
            f"the drafter's {path} is {'cut short' if size < start + end else 'damaged'}: expected "
            f"{start + end} bytes, found {size}. {AGAIN}"
        )
    return {name: tuple(entry["shape"]) for name, entry in table.items()}


def check_draft_files(folder: Path, raw: Mapping[str, Any], config: HyperDFlashConfig) -> None:
    """Refuse a folder whose safetensors are not those that its ``config.json`` describes.

    Raises:
        HyperDFlashConfigError: none there, one cut short, or a tensor missing, extra, repeated or
            misshapen; the message has the path, the cause and what to do.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise HyperDFlashConfigError(
            f"--speculative-draft-model-path {folder} holds no *.safetensors; pickled weights are "
            "not loaded. Re-export the drafter."
        )
    found = [pair for path in files for pair in _shapes(path).items()]
    try:
        check_names(found, expected_tensors(raw, config))
    except HyperDFlashConfigError as error:
        raise HyperDFlashConfigError(f"{folder}: {error} {AGAIN}") from error
