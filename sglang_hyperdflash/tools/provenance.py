"""Where a number came from: command line, commit, versions, machine."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from sglang_hyperdflash import __version__

CHECKOUT = Path(__file__).resolve().parents[2]
# A path that starts at the root, at a home or with dots; not the path of a URL.
_PATH = re.compile(r"""(?<![\w./:~-])(?:~|\.\.?)?/[^\s,:='"]+""")


def without_machine(text: str) -> str:
    """Return a text without this machine's paths, for published files.

    Paths inside the checkout become relative to it. Others become ``.../`` and their last part,
    like ``.../benchmarks``. URLs and paths without a leading ``/``, ``~`` or ``.`` stay as they
    are.
    """

    def portable(match: re.Match[str]) -> str:
        path = Path(match[0]).expanduser().resolve()
        inside = path.is_relative_to(CHECKOUT)
        return str(path.relative_to(CHECKOUT)) if inside else f".../{path.name}"

    return _PATH.sub(portable, text)


def published(words: Iterable[str]) -> list[str]:
    """Return the words of a command line without this machine's folders or keys."""
    result, key = [], False
    for word in words:
        shown = re.sub(r"(api-key[ =])\S+", r"\1KEY", without_machine(word))
        result.append("KEY" if key else shown)
        key = word.endswith("api-key")
    return result


def _commit() -> str | None:
    """Return the commit of this checkout, with ``+changes`` if files differ from it; else None."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--exclude=*"]
    command.append("--dirty=+changes")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    name = model[1] if model else platform.processor()
    return f"CPU: {name}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance() -> dict[str, str | None]:
    """Return facts to store with every measured result, without this machine's folders or keys."""
    import torch  # late: help needs no torch

    return {
        "argv": shlex.join([Path(sys.argv[0]).name, *published(sys.argv[1:])]),
        "commit": _commit(),
        "sglang_hyperdflash": __version__,
        "sglang": _version("sglang"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "device": _device(),
    }
