"""Imports go downwards only: a package may import those before it, and none in a circle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT

PRODUCT = "sglang_hyperdflash"
# Packages of one tuple do not import each other.
LAYERS = (
    (PRODUCT,),
    (f"{PRODUCT}.tools",),
    (f"{PRODUCT}.seams",),
    ("triton_ops",),
    (f"{PRODUCT}.draft",),
    (f"{PRODUCT}.targets",),
    (f"{PRODUCT}.cpu.portable",),
    (f"{PRODUCT}.training",),
    # A server records into a store.
    (f"{PRODUCT}.serving",),
    (f"{PRODUCT}.cpu.platform",),
    ("eval",),
    (f"{PRODUCT}.commands",),
    (f"{PRODUCT}.cpu.registration",),
    (f"{PRODUCT}.cli", f"{PRODUCT}.plugin"),
    (f"{PRODUCT}.__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in (PRODUCT, "triton_ops", "eval")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def layer(module: str) -> str:
    """The package of the table that a module belongs to."""
    parts = module.split(".")
    return next(name for n in (3, 2, 1) if (name := ".".join(parts[:n])) in LEVEL)


def imports(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # A module imported by name from its package.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            module = name if name in MODULES else name.rpartition(".")[0]
            if module in MODULES and MODULES[module] != path:
                yield module


def test_no_import_climbs_and_none_is_in_a_circle():
    arrows = {module: set(imports(path)) for module, path in MODULES.items()}
    climbing = [
        f"{module} imports {other}"
        for module, others in arrows.items()
        for other in others
        if layer(other) != layer(module) and LEVEL[layer(other)] >= LEVEL[layer(module)]
    ]
    assert climbing == []
    TopologicalSorter(arrows).prepare()  # raises CycleError


def test_only_eval_imports_eval():
    """``eval`` is not installed: every command works without it."""
    for module, path in MODULES.items():
        if layer(module) != "eval":
            assert not any(layer(other) == "eval" for other in imports(path)), module
