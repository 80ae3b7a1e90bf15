"""Every place where the package touches SGLang, found in the code: the rows of ``hooks.md``.

Hooks come from ``plugin.ALL_SEAMS``. Overrides are methods of our classes that an SGLang base class
has, too. Calls are imported names. Fields are attributes of SGLang's objects that are private, or
that our code sets.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_hyperdflash import plugin

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "sglang_hyperdflash"
CPU = f"{PRODUCT}/cpu"
# Where code runs inside SGLang and touches its objects.
OURS = ("serving", "targets", "commands/capture_rows.py", "plugin.py", "seams.py")
INSIDE = (*(f"{PRODUCT}/{one}" for one in OURS), CPU)
NOT_INSIDE = "cpu/portable/core.py"


class Use(NamedTuple):
    """One row. ``ours``: file and function or class; ``cpu``: only on the CPU platform."""

    kind: str
    name: str
    parameters: str
    ours: str
    reason: str
    cpu: bool


def parameters_of(function: object) -> str:
    return f"({', '.join(inspect.signature(inspect.unwrap(function)).parameters)})"


def sentence(text: str | None) -> str:
    """A docstring's first sentence."""
    text = re.sub(r"^Seams?: |:\w+:(?=`)", "", " ".join((text or "").split())).replace("``", "`")
    return re.split(r"\.(?= [A-Z`]|$)", text)[0]


def place(path: Path, name: str = "") -> str:
    shown = str(path.relative_to(ROOT)).removeprefix(f"{PRODUCT}/")
    return f"{shown}: {name}" if name else shown


def on_cpu(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(CPU)


def files(places: tuple[str, ...]) -> list[Path]:
    found = [ROOT / one for one in places]
    return [p for one in found for p in (sorted(one.rglob("*.py")) if one.is_dir() else [one])]


def hooks() -> Iterator[Use]:
    for seam in plugin.ALL_SEAMS:
        path = Path(inspect.getsourcefile(seam.hook))
        reason = sentence(inspect.getdoc(seam.hook))
        reason += f" (only with `{seam.only_with}`)" if seam.only_with else ""
        given = parameters_of(pkgutil.resolve_name(seam.target))
        ours = place(path, seam.hook.__name__)
        cpu = seam in plugin.CPU_SEAMS
        yield Use(f"hook: {seam.kind}", seam.dotted, given, ours, reason, cpu)


def own_classes() -> list[type]:
    """Our classes with a base class of SGLang's."""
    found = {}
    for path in files(INSIDE):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for one in vars(importlib.import_module(name)).values():
            own = inspect.isclass(one) and one.__module__ == name
            if own and any(base.__module__.startswith("sglang.") for base in one.__mro__):
                found[one] = None
    return list(found)


def overridden(owner: type) -> Iterator[tuple[str, Callable, type, Callable]]:
    """Name, our function, SGLang's class and its function, of each method that ``owner`` overrides.

    A property counts with its getter.
    """
    bases = [base for base in owner.__mro__[1:] if base.__module__.startswith("sglang.")]
    for name, value in vars(owner).items():
        ours = getattr(value, "fget", getattr(value, "__func__", value))
        base = next((base for base in bases if name in vars(base)), None)
        if inspect.isfunction(ours) and base is not None:
            theirs = vars(base)[name]
            yield name, ours, base, getattr(theirs, "fget", getattr(theirs, "__func__", theirs))


def overrides() -> Iterator[Use]:
    for owner in own_classes():
        path = Path(inspect.getsourcefile(owner))
        for name, ours, base, theirs in overridden(owner):
            reason = sentence(inspect.getdoc(ours) if ours.__doc__ else inspect.getdoc(owner))
            full = f"{base.__module__}.{base.__name__}.{name}"
            where = place(path, owner.__name__)
            yield Use("override", full, parameters_of(theirs), where, reason, on_cpu(path))


class Reader(ast.NodeVisitor):
    """Imports from SGLang, and attributes that are read or set, each with a reason."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[tuple[str, str], str] = {}
        self.attributes: dict[str, tuple[set[str], str]] = {}
        self.own: set[str] = set()
        self.modules: set[str] = set()
        self.reasons = [ast.get_docstring(tree)]
        self.visit(tree)

    def inside(self, node: ast.AST) -> None:
        self.own.add(node.name)
        self.reasons.append(ast.get_docstring(node) or self.reasons[-1])
        self.generic_visit(node)
        self.reasons.pop()

    visit_FunctionDef = visit_ClassDef = inside

    def visit_Import(self, node: ast.Import) -> None:
        self.modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module.split(".")[0] == "sglang":
                self.imports.setdefault((node.module, alias.name), sentence(self.reasons[-1]))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.own.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        root, sets = node.value, isinstance(node.ctx, ast.Store)
        while isinstance(root, ast.Attribute):
            root = root.value
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if sets and of_self:
            self.own.add(node.attr)
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if isinstance(root, ast.Name) and root.id in self.modules:
            return
        if private or (sets and not of_self):
            reason = sentence(self.reasons[-1])
            kinds, _ = self.attributes.setdefault(ast.unparse(node), (set(), reason))
            kinds.add("set" if sets else "read")


def calls() -> Iterator[Use]:
    for path in files((PRODUCT,)):
        for (module, name), reason in Reader(ast.parse(path.read_text())).imports.items():
            found = pkgutil.resolve_name(f"{module}:{name}") if has(module, name) else None
            shown = parameters_of(found) if inspect.isroutine(found) else ""
            yield Use("call", f"{module}.{name}", shown, place(path), reason, on_cpu(path))


def has(module: str, name: str) -> bool:
    """Whether an imported name is not a module itself."""
    return hasattr(importlib.import_module(module), name)


def fields() -> Iterator[Use]:
    read = {path: Reader(ast.parse(path.read_text())) for path in files(INSIDE)}
    own = set().union(*(one.own for one in read.values()))
    for path, one in read.items():
        for expression, (kinds, reason) in one.attributes.items():
            if expression.rpartition(".")[2] not in own and place(path) != NOT_INSIDE:
                kind = f"field: {' and '.join(sorted(kinds))}"
                yield Use(kind, expression, "", place(path), reason, on_cpu(path))


def uses() -> list[Use]:
    """All of them: kind by kind, then by SGLang's name."""
    kinds = [list(kind()) for kind in (hooks, overrides, calls, fields)]
    return [use for kind in kinds for use in sorted(kind, key=lambda use: (use.name, use.ours))]
