"""Every place where the package touches SGLang, found in the code, for ``hooks.md``."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sglang_hyperdflash import plugin

PACKAGE = Path(plugin.__file__).resolve().parent
# Where code runs inside SGLang and touches its objects.
INSIDE = ("serving/", "targets/", "plugin.py", "seams.py", "cpu/")
NOT_INSIDE = "cpu/portable/core.py"


def place(path: str | Path) -> str:
    return Path(path).relative_to(PACKAGE).as_posix()


def location(definition: Callable | type) -> str:
    """Return the file and the name of a function or class of ours."""
    return f"{place(inspect.getsourcefile(definition))}: {definition.__name__}"


def paths_inside() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if place(path).startswith(INSIDE)]


def hooks() -> Iterator[tuple[str, str, str, str]]:
    """Yield SGLang's function, our docstring's first sentence, kind and location of every hook."""
    for seam in sorted(plugin.ALL_SEAMS, key=lambda seam: seam.dotted):
        text = " ".join((inspect.getdoc(seam.hook) or "").split())
        text = re.sub(r"^Seams?: |:\w+:(?=`)", "", text).replace("``", "`")
        condition = f" (only with `{seam.only_with}`)" if seam.only_with else ""
        reason = re.split(r"\.(?= [A-Z`]|$)", text)[0] + condition
        yield seam.dotted, reason, seam.kind, location(seam.hook)


def function_of(member: Any) -> Any:
    """Return the function of a method, or the getter of a property."""
    return getattr(member, "fget", getattr(member, "__func__", member))


def overrides() -> Iterator[tuple[str, type, Callable, Callable]]:
    """Yield SGLang's method, our class, our function and SGLang's function of every override."""
    for path in paths_inside():
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        classes = filter(inspect.isclass, vars(importlib.import_module(module)).values())
        for owner in dict.fromkeys(c for c in classes if c.__module__ == module):
            bases = [base for base in owner.__mro__ if base.__module__.startswith("sglang.")]
            for name, member in vars(owner).items():
                base = next((base for base in bases if name in vars(base)), None)
                function = function_of(member)
                if base is not None and inspect.isfunction(function):
                    method = f"{base.__module__}.{base.__name__}.{name}"
                    yield method, owner, function, function_of(vars(base)[name])


def imports() -> dict[str, set[str]]:
    """Return the names that the package imports from SGLang, each with the files that do so."""
    files = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "sglang":
                for alias in node.names:
                    files[f"{node.module}.{alias.name}"].add(place(path))
    return files


def fields() -> dict[str, set[str]]:
    """Return SGLang's attributes that are private or that our code sets, each with its files."""
    files, defined = defaultdict(set), set()
    for path in paths_inside():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules = {(alias.asname or alias.name).split(".")[0] for alias in aliases}
        for node in nodes:
            is_set = isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and is_set:
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if is_set and owner in ("self", "cls"):
                    defined.add(node.attr)
                elif is_set or re.match("_(?!_)", node.attr):
                    root = re.fullmatch(r"(\w+)[\w.]*", owner)
                    if place(path) != NOT_INSIDE and not (root and root[1] in modules):
                        files[f"{owner}.{node.attr}"].add(place(path))
    return {name: files[name] for name in files if name.rpartition(".")[2] not in defined}
