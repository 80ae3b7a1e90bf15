"""``hyperdflash check``: whether this installation can serve, without loading a model."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_hyperdflash import SGLANG_VERSION, __version__, seams
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.server_process import API_KEY


class Finding(NamedTuple):
    """One line of the report; ``ok`` is False if a server would not start or would be wrong."""

    subject: str
    detail: str
    ok: bool


def sglang_version() -> str:
    """Return the installed SGLang version; raise ``SeamError`` unless it is the pinned one."""
    seams.check_version()
    return f"{SGLANG_VERSION}, with sglang-hyperdflash {__version__}"


def hooks() -> str:
    """Load the plugins as SGLang does, import every hooked module and check every seam.

    Raises:
        SeamError: the plugin was not loaded, or a seam is not in place.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for seam in seams.recorded:
        importlib.import_module(seam.module)
    seams.check_installed()
    return f"{len(seams.recorded)} hooks in place, each matching the source it was written for"


def platform() -> str:
    """Return the platform that SGLang chose, and the CUDA device."""
    from sglang.srt.platforms import current_platform

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device found"
    return f"{current_platform!r}: {cuda}"


CHECKS: dict[str, Callable[[], str]] = {
    "sglang": sglang_version,
    "seams": hooks,
    "platform": platform,
}


def examine() -> list[Finding]:
    """Run every check, also after one that fails, and list the environment variables."""
    findings = []
    for subject, check in CHECKS.items():
        try:
            findings.append(Finding(subject, check(), True))
        except (HyperDFlashError, ImportError, RuntimeError) as error:
            findings.append(Finding(subject, str(error), False))
    names = sorted(name for name in os.environ if name.startswith(("HYPERDFLASH_", "SGLANG_PL")))
    # People paste this into reports.
    values = {name: "set" if name == API_KEY else os.environ[name] for name in names}
    variables = ", ".join(f"{name}={value}" for name, value in values.items())
    return [*findings, Finding("environment", variables or "no HYPERDFLASH variable is set", True)]


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 2 if one is wrong, with ``--gpu`` 1.

    Raises:
        HyperDFlashError: an option of ``--gpu`` was given without it.
    """
    if not args.gpu and (args.all or args.json):
        raise HyperDFlashError("--all and --json are options of check --gpu; add it.")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.gpu:
        from sglang_hyperdflash.commands import check_gpu

        return check_gpu.run_gpu(args.all, args.json)
    findings = examine()
    for finding in findings:
        print(f"{finding.subject:<12}{'ok' if finding.ok else 'WRONG':<7}{finding.detail}")
    return 0 if all(finding.ok for finding in findings) else 2


def add_parser(commands) -> None:
    """Register ``check`` and its arguments."""
    text = "check whether this installation can serve"
    parser = commands.add_parser("check", help=text, description=__doc__.splitlines()[0])
    text = "compile every kernel, compare it with its reference on this GPU, and time it"
    parser.add_argument("--gpu", action="store_true", help=text)
    parser.add_argument("--all", action="store_true", help="--gpu: FlashInfer's attention, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="--gpu: write the report there")
    parser.set_defaults(run=run)
