"""Where a number came from: command line, commit, versions, machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from sglang_hyperdflash import __version__

CHECKOUT = Path(__file__).resolve().parents[2]
# A path that starts at the root, at a home, or at a folder named by dots; not the path of a URL.
_PATH = re.compile(r"""(?<![\w./:~-])(?:~|\.\.?)?/[^\s,:='"]+""")


def without_machine(text: str) -> str:
    """A text without this machine's paths, for published files.

    Paths inside the checkout become relative to it. Others become ``.../`` and their last part,
    like ``.../benchmarks``. URLs and paths without a leading ``/``, ``~`` or ``.`` stay as they
    are.
    """

    def shown(match: re.Match[str]) -> str:
        path = Path(match[0]).expanduser().resolve()
        inside = path.is_relative_to(CHECKOUT)
        return str(path.relative_to(CHECKOUT)) if inside else f".../{path.name}"

    return _PATH.sub(shown, text)


def _commit() -> str | None:
    """The commit of this checkout, with ``+changes`` when files differ from it; else None."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("diff", "HEAD") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    facts = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", facts.read_text()) if facts.is_file() else None
    name = found[1] if found else platform.processor()
    return f"CPU: {name}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance() -> dict[str, str | None]:
    """Facts to store with every measured result; paths without this machine's folders."""
    arguments = [without_machine(word) for word in sys.argv[1:]]
    return {
        "argv": shlex.join([Path(sys.argv[0]).name, *arguments]),
        "commit": _commit(),
        "sglang_hyperdflash": __version__,
        "sglang": _version("sglang"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "device": _device(),
    }
