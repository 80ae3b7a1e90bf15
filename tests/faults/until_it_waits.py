"""Runs a ``hyperdflash`` command without an end until it waits for new samples: exit status 0.

It is then ended by SIGTERM, as a user ends it; any other end is this process's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

COMMAND = [sys.executable, "-m", "sglang_hyperdflash.cli"]


def main() -> int:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [*COMMAND, *sys.argv[1:]]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command answers for both
    for line in child.stdout:
        if "waiting for new samples" in line:
            child.terminate()
    code = child.wait()
    return 0 if code == 128 + signal.SIGTERM else code


if __name__ == "__main__":
    sys.exit(main())
