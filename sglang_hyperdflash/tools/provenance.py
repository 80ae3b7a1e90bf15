"""Where a number came from: command line, commit, versions, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from sglang_hyperdflash import __version__


def _commit() -> str | None:
    """The commit of this checkout, with ``+changes`` when files differ from it; else None."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("diff", "HEAD") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = (
        {
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        }
        if Path("/proc/cpuinfo").is_file()
        else {platform.processor()}
    )
    return f"CPU: {', '.join(sorted(names))}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance() -> dict[str, str | None]:
    """Facts to store beside every measured result."""
    return {
        "argv": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "sglang_hyperdflash": __version__,
        "sglang": _version("sglang"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "device": _device(),
    }
