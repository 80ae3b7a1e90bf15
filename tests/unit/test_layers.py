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


def imports(path: Path, lazy: bool = True) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere or (not ``lazy``) at its top level."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if lazy else tree.body:
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


def test_only_the_demo_imports_eval_and_only_when_it_runs():
    """``eval`` is not installed: every other command works without it."""
    for module, path in MODULES.items():
        if layer(module) != "eval":
            lazy = any(layer(other) == "eval" for other in imports(path))
            assert not lazy or module == f"{PRODUCT}.commands.demo"
            assert not any(layer(other) == "eval" for other in imports(path, lazy=False))
