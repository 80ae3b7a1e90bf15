"""A program that is started warm and cold: what it finds, and what those that it spawns find."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time


def facts() -> dict:
    """What a process knows of itself."""
    return {
        "arguments": sys.argv,
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "session": os.getsid(0),
        "descriptors": [
            number for number in range(60) if os.path.exists(f"/proc/self/fd/{number}")
        ],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "method": multiprocessing.get_start_method(allow_none=True),
        "main": __name__,
        "parent": os.getppid(),
        "process": os.getpid(),
        "random": random.random(),
        "warm": "wave" in sys.modules,
        "changed": "colorsys" in sys.modules,
    }


def spawned(pipe) -> None:
    """Tell the spawning process about this one, and do not end before it says so."""
    pipe.send(facts())
    pipe.recv()
    sys.exit(3)


def main() -> None:
    """Print this process's facts and those of two that it spawns; ``wait`` then waits for ever."""
    import colorsys  # noqa: F401

    context = multiprocessing.get_context("spawn")
    found, processes = [facts()], []
    for _ in range(2):
        pipe, other = context.Pipe()
        processes.append(context.Process(target=spawned, args=(other,), daemon=True))
        processes[-1].start()
        other.close()
        found.append(pipe.recv() | {"as told": processes[-1].pid})
        if "wait" not in sys.argv:
            pipe.send("go")
            processes[-1].join()
            found[-1]["code"] = processes[-1].exitcode
        else:
            processes[-1].kept = pipe
    print(json.dumps(found), flush=True)
    while "wait" in sys.argv:
        time.sleep(1)
    sys.exit(7)


if __name__ == "__main__":
    main()
