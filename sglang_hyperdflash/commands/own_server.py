"""The SGLang server of an offline command, which starts and ends it."""

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

# The last line of a traceback, and what argparse says of a command line.
REASON = re.compile(r"^(?:[\w.]*(?:Error|Exception)|.*: error): (.+)$", re.MULTILINE)


@contextmanager
def own_server(
    arguments: Mapping[str, Any], *, verbose: bool, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ready; it ends with the block.

    Args:
        arguments: by their names in SGLang's ``ServerArgs``; None is left out.
        verbose: show the server's log on standard error; otherwise only its error is shown.
        environment: variables for the server.

    Raises:
        HyperDFlashConfigError: SGLang starts no server of these arguments. ServerFailed: of the
            block, with the end of the log.
    """
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(environment or {})}
    with TemporaryDirectory(prefix="hyperdflash-") as folder:
        options = Path(folder) / "server.yaml"  # JSON is YAML
        given = {k.replace("_", "-"): v for k, v in arguments.items() if v is not None}
        model = given.pop("model-path")
        options.write_text(json.dumps(given))
        log = None if verbose else Path(folder) / "server.log"
        server = Server(
            model, "--config", str(options), log=log, threads=None, environment=environment
        )
        with server:
            try:
                server.wait(math.inf)
            except ServerFailed as error:
                said = REASON.findall(server.log_tail(1000))
                reason = f": {said[-1]}" if said else ""
                hint = "" if said else f"\n{error}"
                raise HyperDFlashConfigError(
                    f"SGLang starts no server of these options{reason.rstrip('.')}. Check them and "
                    f"--engine-args; --verbose shows its log.{hint}"
                ) from error
            try:
                yield server
            except ServerFailed as error:
                tail = server.log_tail(5)
                raise ServerFailed(f"{error} --verbose shows its log.\n{tail}".rstrip()) from error
