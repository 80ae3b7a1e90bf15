"""The SGLang server that an offline command starts for itself and ends."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, ServerFailed
from sglang_hyperdflash.tools.server_process import Server

# The last line of a traceback, or argparse's error about a command line.
REASON = re.compile(r"^(?:[\w.]*(?:Error|Exception)|.*: error): (.+)$", re.MULTILINE)


@contextmanager
def start_server(
    arguments: Mapping[str, Any], *, verbose: bool, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and end it with the block.

    Args:
        arguments: values by their names in SGLang's ``ServerArgs``; None is left out.
        verbose: whether to show the server's log on standard error; otherwise only its error is.
        environment: environment variables of the server.

    Raises:
        HyperDFlashConfigError: SGLang starts no server with these arguments.
        ServerFailed: the block raised it; the end of the log is added.
    """
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(environment or {})}
    with TemporaryDirectory(prefix="hyperdflash-") as folder:
        config = Path(folder) / "server.yaml"  # JSON is YAML
        options = {k.replace("_", "-"): v for k, v in arguments.items() if v is not None}
        model = options.pop("model-path")
        config.write_text(json.dumps(options))
        log = None if verbose else Path(folder) / "server.log"
        with Server(
            model, "--config", str(config), log=log, threads=None, environment=environment
        ) as server:
            try:
                server.wait(math.inf)
            except ServerFailed as error:
                reasons = REASON.findall(server.log_tail(1000))
                reason = f": {reasons[-1]}" if reasons else ""
                hint = "" if reasons else f"\n{error}"
                raise HyperDFlashConfigError(
                    f"SGLang starts no server of these options{reason.rstrip('.')}. Check them and "
                    f"--engine-args; --verbose shows its log.{hint}"
                ) from error
            try:
                yield server
            except ServerFailed as error:
                tail = server.log_tail(5)
                raise ServerFailed(f"{error} --verbose shows its log.\n{tail}".rstrip()) from error
