"""``hyperdflash check``: whether this installation can serve, without loading a model."""

from __future__ import annotations

import argparse
import logging
import os
import pkgutil
import warnings
from collections.abc import Callable

import torch

from sglang_hyperdflash import SGLANG_VERSION, __version__, seams
from sglang_hyperdflash.tools.errors import HyperDFlashError, SeamError
from sglang_hyperdflash.tools.process_group import sigint_exits
from sglang_hyperdflash.tools.server_process import API_KEY


def sglang_version() -> str:
    """Return the installed SGLang version; raise ``SeamError`` unless it is the pinned one."""
    seams.check_version()
    return f"{SGLANG_VERSION}, with sglang-hyperdflash {__version__}"


def hooks() -> str:
    """Load the plugins as SGLang does, and compare every hooked function with the pinned one's.

    Of another SGLang, where no hook is put in place, they are compared as well.

    Raises:
        SeamError: functions differ, or a hook is not in place.
    """
    from sglang.srt.plugins import load_plugins

    with sigint_exits("hyperdflash check: interrupted"):
        declared = seams.recorded
        try:
            seams.check_version()
            load_plugins()
        except SeamError:
            # Declared above the commands, which its hooks are made of.
            declared = pkgutil.resolve_name("sglang_hyperdflash.plugin:ALL_SEAMS")
        by_target = {seam.target: seams.difference(seam) for seam in declared}
    wrong = [f"\n  {target} {text}" for target, text in by_target.items() if text]
    if wrong:
        count = f"{len(wrong)} of {len(by_target)}"
        raise SeamError(f"{count} hooked functions of SGLang differ:{''.join(wrong)}")
    if declared is seams.recorded:
        seams.check_installed()
    return f"{len(by_target)} hooks, each on the function that it was written for"


def platform() -> str:
    """Return the platform that SGLang chose, the CUDA device, and what can be served on it."""
    from sglang.srt.platforms import current_platform

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device found"
    if not torch.accelerator.is_available():
        cuda += "; this machine can serve the tiny target only"
    return f"{current_platform!r}: {cuda}"


def environment() -> str:
    """Return the environment variables that matter, as people paste them into reports."""
    names = sorted(name for name in os.environ if name.startswith(("HYPERDFLASH_", "SGLANG_PL")))
    values = {name: "set" if name == API_KEY else os.environ[name] for name in names}
    variables = ", ".join(f"{name}={value}" for name, value in values.items())
    return variables or "no HYPERDFLASH variable is set"


CHECKS: dict[str, Callable[[], str]] = {
    "sglang": sglang_version,
    "hooks": hooks,
    "platform": platform,
    "environment": environment,
}


def examine() -> bool:
    """Run every check, also after one that fails; print each and return whether all are right.

    A check's name is printed before it runs, since some take tens of seconds.
    """
    right = True
    for subject, check in CHECKS.items():
        print(f"{subject:<12}", end="", flush=True)
        try:
            print(f"ok     {check()}")
        except (HyperDFlashError, ImportError, RuntimeError) as error:
            print(f"WRONG  {error}")
            right = False
    return right


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 2 if a server would not start, with ``--gpu`` 1.

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
    return 0 if examine() else 2
