"""How this package hooks SGLang's private functions: one decorated function of ours each.

The decorators are ``after``, ``around`` and ``replace``; ``plugin.ALL_SEAMS`` lists the seams.
SGLang's plugin loader logs exceptions and continues, so a hook that could not be applied would go
unnoticed. ``install`` therefore records its seams, and ``check_installed`` refuses to start and
names those that are missing; it is called when the server arguments are validated and when the
worker is created. A seam also holds a hash of the syntax tree of the function its hook was written
for: another SGLang fails at start, not in mid-request, but a comment patched upstream stops no
server.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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


_recorded: list[Seam] = []
_in_place: set[str] = set()
_failures: list[SeamError] = []


def install(seams: Iterable[Seam]) -> None:
    """Hook every enabled seam as soon as SGLang imports its module.

    Raises:
        SeamError: SGLang is not the pinned version.
    """
    check_version()
    for seam in seams:
        if seam.only_with is None or os.environ.get(seam.only_with):
            _recorded.append(seam)
            when_imported(seam.module, lambda seam=seam: _hook(seam))


def _hook(seam: Seam) -> None:
    """Check and hook a seam; a failure is recorded and stops HYPERDFLASH servers only."""
    try:
        check_seam(seam)
        _apply(seam)
    except Exception as error:  # this runs inside the import of a module of SGLang
        wrong = f"SGLang seam {seam.target} could not be hooked: {error!r}"
        _failures.append(error if isinstance(error, SeamError) else SeamError(wrong))
        logger.warning("%s", _failures[-1])


def _apply(seam: Seam) -> None:
    """Wrap a seam's target in its module and wherever else its name was imported.

    Seam: ``HookRegistry._apply_target``, without the registry's list: ``apply_hooks`` would import
    the modules of all plugins' hooks now, and skip what another plugin registers later.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("hyperdflash", "sglang-hyperdflash")
    try:
        HookRegistry._apply_target(seam.dotted, [(HookType(seam.kind), seam.hook, source)])
    except AttributeError as error:
        raise SeamError(f"SGLang's hook registry changed: {error}") from error
    _in_place.add(seam.target)


def check_version() -> None:
    """Refuse any SGLang but the pinned one."""
    found = metadata.version("sglang")
    if found.split("+")[0] != SGLANG_VERSION:
        raise SeamError(
            f"sglang-hyperdflash works with sglang=={SGLANG_VERSION}; found {found}. "
            f"Run: pip install sglang=={SGLANG_VERSION}"
        )


def source_hash(function: Callable) -> str:
    """The first 12 hex digits of the SHA-256 of a function's syntax tree.

    Decorators, parameters and defaults are in it; comments, layout and docstrings are not.
    """
    source = inspect.getsource(function)
    if source[0].isspace():  # a method; dedenting would change strings of several lines
        source = "if True:\n" + source
    return hashlib.sha256(repr(_outline(ast.parse(source))).encode()).hexdigest()[:12]


def _outline(node: object) -> object:
    """A syntax tree as nested tuples, the same in Python 3.10 to 3.13.

    Empty fields are left out, since each version adds some (``type_params`` in 3.12), and so is
    ``kind``, the ``u`` before a string.
    """
    if isinstance(node, list):
        return tuple(map(_outline, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name != "kind"}
    documented = ast.AsyncFunctionDef, ast.FunctionDef, ast.ClassDef
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    filled = ((name, _outline(value)) for name, value in fields.items() if value not in (None, []))
    return type(node).__name__, *filled


def check_seam(seam: Seam) -> None:
    """Refuse a seam whose target is gone or differs from the one its hook was written for."""
    try:
        function = inspect.unwrap(pkgutil.resolve_name(seam.target))
    except (AttributeError, ImportError) as error:
        raise SeamError(f"SGLang seam {seam.target} is gone: {error}") from error
    digest = source_hash(function)
    if digest != seam.source:
        raise SeamError(
            f"SGLang seam {seam.target} changed: expected source {seam.source}, found {digest} of "
            f"{inspect.signature(function)}. Use an unmodified sglang=={SGLANG_VERSION}."
        )


def overridden(owner: type) -> Iterator[tuple[str, Callable, type, Callable]]:
    """Name, our function, SGLang's class and its function, of each method that ``owner`` overrides.

    A property counts with its getter.
    """
    if owner.__module__.startswith("sglang."):
        return
    bases = [base for base in owner.__mro__[1:] if base.__module__.startswith("sglang.")]
    for name, value in vars(owner).items():
        ours = getattr(value, "fget", getattr(value, "__func__", value))
        base = next((base for base in bases if name in vars(base)), None)
        if inspect.isfunction(ours) and base is not None:
            theirs = vars(base)[name]
            yield name, ours, base, getattr(theirs, "fget", getattr(theirs, "__func__", theirs))


def check_overrides(cls: type) -> None:
    """Refuse a class whose methods cannot be called as the ones of SGLang that they override.

    Raises:
        SeamError: ours lacks a parameter, needs another one, or has them in another order.
    """
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for owner in cls.__mro__:
        for name, ours, base, theirs in overridden(owner):
            own, needed = (inspect.signature(one).parameters for one in (ours, theirs))
            open_ended = any(one.kind in rest for one in own.values())
            given = [one for one in needed if needed[one].kind not in rest]
            common = [one for one in given if one in own]
            more = [one for one in own.values() if one.name not in needed and one.kind not in rest]
            fits = (open_ended or common == given) and common == [o for o in own if o in given]
            if not fits or any(one.default is one.empty for one in more):
                raise SeamError(
                    f"SGLang's {base.__module__}:{base.__name__}.{name} changed: expected "
                    f"parameters {tuple(own)}, found {tuple(needed)}. Use an unmodified "
                    f"sglang=={SGLANG_VERSION}."
                )


def recorded() -> tuple[Seam, ...]:
    """The seams that :func:`install` received in this process."""
    return tuple(_recorded)


def in_place() -> frozenset[str]:
    """The targets hooked in this process."""
    return frozenset(_in_place)


def check_installed() -> None:
    """Raise ``SeamError`` naming every seam whose hook is missing in this process.

    A seam whose module SGLang has not imported in this process has nothing to hook yet.
    """
    if _failures:
        raise SeamError("; ".join(map(str, _failures)))
    imported = [seam for seam in _recorded if seam.module in sys.modules]
    missing = [seam.target for seam in imported if seam.target not in _in_place]
    if missing or not _recorded:
        raise SeamError(
            f"{ALGORITHM} cannot start: these SGLang hooks are not in place: "
            f"{', '.join(missing) or 'all of them'}. Check that SGLANG_PLUGINS does not exclude "
            f"hyperdflash, that sglang is {SGLANG_VERSION}, and the log above for the loader's "
            "error."
        )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are not set yet, inside the context."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Runs callbacks right after a module's import, before anything reads names from it."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self.environment: dict[str, dict[str, str]] = {}

    def find_spec(self, name, path, target=None):
        if name not in self.waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                with _environment(self.environment.pop(name, {})):
                    execute(module)
                for callback in self.waiting.pop(name, ()):
                    callback()

            spec.loader.exec_module = exec_module
        return spec


_watch = _ImportWatch()


def when_imported(
    module: str, callback: Callable[[], None], environment: Mapping[str, str] | None = None
) -> None:
    """Call ``callback`` after ``module`` is imported; immediately, if it already is.

    Importing every hooked module at once would cost every server process seconds.

    Args:
        environment: variables for the time of that import only, unless the user set them.
    """
    if module in sys.modules:
        callback()
        return
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.waiting.setdefault(module, []).append(callback)
    _watch.environment.setdefault(module, {}).update(environment or {})
