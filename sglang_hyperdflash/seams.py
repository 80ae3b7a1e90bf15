"""How this package hooks SGLang's private functions: one decorated function of ours each.

The decorators are ``after``, ``around`` and ``replace``; ``plugin.ALL_SEAMS`` lists the seams.
SGLang's plugin loader logs exceptions and continues, so a hook that could not be applied would go
unnoticed. ``install`` therefore records its seams, and ``check_installed`` refuses to start and
names those that are missing; it is called when the server arguments are validated and when the
worker is created. A seam also holds a hash of the source of the function that its hook was written
for: another SGLang fails at start, not in mid-request.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Literal

from sglang_hyperdflash import ALGORITHM, SGLANG_VERSION
from sglang_hyperdflash.tools.errors import SeamError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seam:
    """One hook.

    Attributes:
        target: ``module:function`` or ``module:Class.method`` of SGLang.
        hook: called as SGLang's ``HookRegistry`` calls a hook of its ``kind``; one per target. The
            first sentence of its docstring is the reason in ``docs/reference/hooks.md``.
        source: the target's :func:`source_hash`.
        only_with: environment variable without which the seam is not used.
    """

    target: str
    kind: Literal["after", "around", "replace"]
    hook: Callable
    source: str
    only_with: str | None = None

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def dotted(self) -> str:
        """The target as ``HookRegistry`` spells it."""
        return self.target.replace(":", ".")


def _declare(kind: str, target: str, source: str, only_with: str | None = None) -> Callable:
    """Decorator: the function is the hook of a :class:`Seam`, its attribute ``seam``."""

    def decorate(hook: Callable) -> Callable:
        hook.seam = Seam(target, kind, hook, source, only_with)
        return hook

    return decorate


after, around, replace = (partial(_declare, kind) for kind in ("after", "around", "replace"))


def declared(*modules: ModuleType) -> tuple[Seam, ...]:
    """The seams whose hooks are in these modules."""
    functions = (one for module in modules for one in vars(module).values())
    return tuple(one.seam for one in functions if inspect.isfunction(one) and hasattr(one, "seam"))


# The seams that this process installs, the targets hooked so far, and what went wrong.
recorded: list[Seam] = []
in_place: set[str] = set()
_failures: list[SeamError] = []


def install(seams: Iterable[Seam]) -> None:
    """Hook every enabled seam as soon as SGLang imports its module.

    Raises:
        SeamError: SGLang is not the pinned version; :func:`check_installed` says so, too.
    """
    enabled = [seam for seam in seams if seam.only_with is None or os.environ.get(seam.only_with)]
    recorded.extend(enabled)
    try:
        check_version()
    except SeamError as error:
        _failures.append(error)
        raise
    waiting = {seam.module for seam in enabled} - sys.modules.keys()
    for module in waiting:
        when_imported(module, partial(_hook, *(one for one in enabled if one.module == module)))
    _hook(*(seam for seam in enabled if seam.module not in waiting))


def _hook(*seams: Seam) -> None:
    """Check seams, and wrap their targets in their modules and wherever a name was imported.

    A failure is recorded and stops HYPERDFLASH servers only. Seam: ``HookRegistry._apply_target``,
    without the registry's list (``apply_hooks`` would import the modules of all plugins' hooks now,
    and skip what another plugin registers later), and with one walk through every module's names
    where it has one of 50 to 150 ms for each target. The walk runs no code and so raises nothing.
    """
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    wrappers: dict[int, Callable] = {}  # by the id of what they wrap, and keep alive
    for seam in seams:
        try:
            check_seam(seam)
            place, _, name = seam.dotted.rpartition(".")
            owner = pkgutil.resolve_name(place)
            raw = inspect.getattr_static(owner, name)
            original = getattr(raw, "__func__", raw)
            wrapped = _wrap_fn(original, seam.hook, HookType(seam.kind))
            setattr(owner, name, wrapped if original is raw else type(raw)(wrapped))
            if inspect.ismodule(owner):  # no module imports a method
                wrappers[id(original)] = wrapped
            in_place.add(seam.target)
        except Exception as error:  # this runs inside the import of a module of SGLang
            wrong = f"SGLang's function {seam.target} could not be hooked: {error!r}"
            _failures.append(error if isinstance(error, SeamError) else SeamError(wrong))
            logger.warning("%s", _failures[-1])
    names_of = ModuleType.__dict__["__dict__"].__get__  # runs no code of a lazy module
    for module in list(sys.modules.values()) if wrappers else ():
        if issubclass(type(module), ModuleType):
            names = names_of(module)
            for name, value in names.copy().items():
                if id(value) in wrappers:
                    names[name] = wrappers[id(value)]


def check_version() -> None:
    """Refuse any SGLang but the pinned one."""
    found = metadata.version("sglang")
    if found.split("+")[0] != SGLANG_VERSION:
        raise SeamError(
            f"sglang-hyperdflash works with sglang=={SGLANG_VERSION}; found {found}. "
            f"Run: pip install sglang=={SGLANG_VERSION}"
        )


def source_hash(function: Callable) -> str:
    """The first 12 hex digits of the SHA-256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


def difference(seam: Seam) -> str | None:
    """What became of a seam's target, or None if it is the one that the hook was written for."""
    try:
        function = inspect.unwrap(pkgutil.resolve_name(seam.target))
    except (AttributeError, ImportError) as error:
        return f"is gone: {error}"
    digest = source_hash(function)
    if digest == seam.source:
        return None
    return (
        f"changed: expected source {seam.source}, found {digest} of {inspect.signature(function)}"
    )


def check_seam(seam: Seam) -> None:
    """Refuse a seam whose target is gone or differs from the one its hook was written for."""
    if text := difference(seam):
        raise SeamError(
            f"SGLang's function {seam.target} {text}. Use an unmodified sglang=={SGLANG_VERSION}."
        )


def check_installed() -> None:
    """Raise ``SeamError`` naming every seam whose hook is missing in this process.

    A seam whose module SGLang has not imported in this process has nothing to hook yet.
    """
    if _failures:
        raise SeamError("; ".join(map(str, _failures)))
    imported = [seam.target for seam in recorded if seam.module in sys.modules]
    missing = [target for target in imported if target not in in_place]
    if missing or not recorded:
        raise SeamError(
            f"{ALGORITHM} cannot start: these SGLang hooks are not in place: "
            f"{', '.join(missing) or 'all of them'}. Check that SGLANG_PLUGINS does not exclude "
            f"hyperdflash, that sglang is {SGLANG_VERSION}, and the log above for the loader's "
            "error."
        )


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Runs callbacks right after a module's import, before anything reads names from it."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, name, path, target=None):
        if name not in self.waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                for callback in self.waiting.pop(name, ()):
                    callback()

            spec.loader.exec_module = exec_module
        return spec


_watch = _ImportWatch()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` after ``module`` is imported; immediately, if it already is.

    Importing every hooked module at once would cost every server process seconds.
    """
    if module in sys.modules:
        callback()
        return
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.waiting.setdefault(module, []).append(callback)
