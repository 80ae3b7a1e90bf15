"""Imports go downwards only: a package may import those before it. Nothing is too long to read."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PRODUCT = "sglang_hyperdflash"
# Packages of one tuple do not import each other.
LAYERS = (
    (PRODUCT, "cpu_engine"),
    (f"{PRODUCT}.tools",),
    (f"{PRODUCT}.seams",),
    ("triton_ops",),
    (f"{PRODUCT}.draft",),
    (f"{PRODUCT}.targets",),
    ("cpu_engine.portable",),
    (f"{PRODUCT}.training",),
    # A server records into a store.
    (f"{PRODUCT}.serving",),
    ("eval",),
    ("cpu_engine.platform", f"{PRODUCT}.commands"),
    ("cpu_engine.rivals",),
    ("cpu_engine.registration",),
    (f"{PRODUCT}.cli", f"{PRODUCT}.plugin"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def room(module: str) -> str | None:
    """The package of the table that a module belongs to, or None for one of others."""
    parts = module.split(".")
    found = [".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in LEVEL]
    return found[0] if found else None


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # A module imported by name from its package.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(
    path
    for folder in (PRODUCT, "triton_ops", "cpu_engine", "eval")
    for path in (ROOT / folder).rglob("*.py")
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def target(name: str) -> str | None:
    """The module of ours that an imported name is, or is in."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in MODULES), None)


@pytest.mark.parametrize("module", MODULES)
def test_no_import_climbs(module):
    own = room(module)
    assert own is not None, f"{module} is in no layer"
    for name in filter(None, map(target, imports(MODULES[module]))):
        other = room(name)
        climbs = other != own and LEVEL[other] >= LEVEL[own]
        assert not climbs, f"{module} ({own}) imports {name} ({other})"


def test_only_the_demo_imports_eval_and_only_when_it_runs():
    """``eval`` is not installed: every other command works without it."""
    for module, path in MODULES.items():
        if room(module) == "eval" or "eval" not in {name.split(".")[0] for name in imports(path)}:
            continue
        assert module == f"{PRODUCT}.commands.demo"
        at_start = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
        assert not any(n.module.split(".")[0] == "eval" for n in at_start)


# What each folder may import besides the standard library; the last rows may use all of it.
LIBRARIES = {
    "tools": {"filelock", "pydantic", "requests", "torch"},
    "seams.py": {"sglang"},
    "triton_ops": {"matplotlib", "sglang", "torch", "triton"},
    "draft": {"pydantic", "torch"},
    "targets": {
        *("deepseek_recipe", "fsspec", "huggingface_hub", "jinja2", "safetensors", "sglang"),
        *("torch", "transformers"),
    },
    "portable": {"numba", "sglang", "torch"},
    "serving": {"numpy", "prometheus_client", "safetensors", "sglang", "torch"},
    "training": {
        *("datasets", "huggingface_hub", "pydantic", "safetensors", "tensorboard"),
        *("torch", "tqdm", "transformers", "wandb"),
    },
    "platform": {"numpy", "psutil", "sglang", "torch"},
    "rivals": {"sglang", "torch"},
    "registration.py": {"sglang"},
}
ALL = set().union(*LIBRARIES.values()) | {"aiohttp", "openai", "scipy"}


@pytest.mark.parametrize("folder", [*LIBRARIES, "commands", "eval", "cli.py", "plugin.py"])
def test_a_folder_imports_its_own_libraries_only(folder):
    own = [path for path in FILES if folder in path.relative_to(ROOT).parts[:2]]
    assert own
    used = {name.split(".")[0] for path in own for name in imports(path)}
    libraries = used - set(sys.stdlib_module_names) - {PRODUCT, "triton_ops", "cpu_engine", "eval"}
    assert libraries <= LIBRARIES.get(folder, ALL)


def test_no_circle_even_inside_a_package():
    arrows = {
        module: {n for n in map(target, imports(path)) if n and n != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in sorted(arrows[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in sorted(arrows):
        visit(module, ())


def test_the_package_itself_holds_four_files():
    found = {path.name for path in (ROOT / PRODUCT).glob("*.py")}
    assert found == {"__init__.py", "cli.py", "plugin.py", "seams.py"}


LINES, LINES_OF_A_FUNCTION = 500, 60
WRITTEN = (PRODUCT, "eval", "triton_ops", "cpu_engine", "tests", "examples")


def too_long(path: Path) -> list[str]:
    """The file, and its functions, that have more lines than a reader takes in at once."""
    text, name = path.read_text(), path.name
    found = [name] if text.count("\n") > LINES else []
    for node in ast.walk(ast.parse(text)):
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if function and node.end_lineno - node.lineno >= LINES_OF_A_FUNCTION:
            found.append(f"{name}:{node.lineno} {node.name}")
    return found


def test_no_file_and_no_function_is_too_long():
    files = [path for folder in WRITTEN for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 300
    assert [place for path in files for place in too_long(path)] == []


def test_what_is_too_long_is_found(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 59)
    assert too_long(path) == []
    path.write_text("async def f():\n" + "    x = 1\n" * 60 + "\n" * 500)
    assert too_long(path) == ["long.py", "long.py:1 f"]
