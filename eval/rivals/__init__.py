"""SGLang's EAGLE and sampled DFLASH without a GPU, to compare with: for ``eval`` and the tests.

Kernels in torch where SGLang has none for a CPU, and the portable target's MTP (NextN) layer. They
are a plugin of SGLang: only servers that run SGLang's own speculation load it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_hyperdflash import ALGORITHM

HERE = Path(__file__).resolve().parent


def environment(arguments: Sequence[str], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a server that loads the plugin; none where its arguments do not need it.

    They name folders of this machine, so no result holds them.

    Args:
        given: holds the ``PYTHONPATH`` to keep.
    """
    if "--speculative-algorithm" not in arguments or ALGORITHM in arguments:
        return {}
    folders = (HERE / "installed", HERE.parents[1], given.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
