"""An ``sgl.Engine`` for a command: started, shown to the user as little as it deserves, stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_engine(arguments: Mapping[str, Any], *, verbose: bool) -> Iterator[Any]:
    """An engine, shut down at the end.

    Args:
        arguments: of ``sgl.Engine``. verbose: let it and its libraries print.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import sglang

    engine = sglang.Engine(**arguments)
    try:
        yield engine
    finally:
        engine.shutdown()
