"""SGLang's EAGLE and sampled DFLASH without a GPU, to compare with, for ``eval`` and the tests.

Kernels in torch where SGLang has none for a CPU, and the portable target's MTP (NextN) layer. They
form a plugin of SGLang, which only servers of SGLang's own speculation load.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_hyperdflash import ALGORITHM

HERE = Path(__file__).resolve().parent


def environment(arguments: Sequence[str], parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a server that loads the plugin; none where its arguments do not need it.

    They name folders of this machine, so no result holds them. The ``PYTHONPATH`` of ``parent``,
    the variables that the server inherits, is kept.
    """
    if "--speculative-algorithm" not in arguments or ALGORITHM in arguments:
        return {}
    folders = (HERE / "installed", HERE.parents[1], parent.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
