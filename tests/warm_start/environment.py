"""What importing reads from the environment: a child that wants it otherwise cannot be forked."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

# Read by libraries in C when they are loaded, where Python sees nothing of it, or by Python itself.
READ_OUT_OF_SIGHT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "DNNL_", "ONEDNN_", "TORCH_"),
    *("PYTORCH_", "TRITON_", "LD_", "GLIBC_", "MALLOC_", "PYTHON", "LANG", "LC_", "TZ"),
)
HARMLESS = {
    # The path is set in the child.
    "PYTHONPATH",
    # One thread of OpenMP, which the template has, does not wait.
    "OMP_WAIT_POLICY",
    # Written by every server for kernels of GPUs, and templates are for machines without one.
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LOG_TO_CONSOLE"),
}


class EnvironmentWatch:
    """Notes every variable that is looked up in ``os.environ`` inside the context.

    Attributes:
        read: names that were looked up before this process wrote them.
        before, after: the whole environment when the context began and ended.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}

    def __enter__(self) -> EnvironmentWatch:
        self.before = dict(os.environ)
        kind, written = type(os.environ), set()
        self._methods = {name: getattr(kind, name) for name in ("__getitem__", "__setitem__")}
        look_up, write = self._methods["__getitem__"], self._methods["__setitem__"]

        def noted_look_up(environment, name):
            if name not in written:
                self.read.add(name)
            return look_up(environment, name)

        def noted_write(environment, name, value):
            written.add(name)
            write(environment, name, value)

        kind.__getitem__, kind.__setitem__ = noted_look_up, noted_write
        return self

    def __exit__(self, *exception) -> None:
        for name, method in self._methods.items():
            setattr(type(os.environ), name, method)
        self.after = dict(os.environ)

    def difference(self, asked: Mapping[str, str]) -> str | None:
        """A variable whose asked value the imports have not seen; None when there is none.

        A process that SGLang spawns has what the imports themselves wrote: that is as good.
        """
        names = {*asked, *self.before, *self.after}
        unseen = {name for name in names if name.startswith(READ_OUT_OF_SIGHT)}
        for name in sorted((self.read | unseen) - HARMLESS):
            if asked.get(name) not in (self.before.get(name), self.after.get(name)):
                return name
        return None

    def apply(self, asked: Mapping[str, str]) -> None:
        """Make ``asked`` this process's environment, as the imports would have left it."""
        os.environ.clear()
        os.environ.update(asked)
        for name in {*self.before, *self.after}:
            if name not in self.after:
                os.environ.pop(name, None)
            elif self.after[name] != self.before.get(name):
                os.environ[name] = self.after[name]


@dataclass(frozen=True)
class SearchPath:
    """``sys.path`` of this interpreter around what ``PYTHONPATH`` brought.

    Attributes:
        before: put at the front by installed packages. after: the standard library and the rest.
        added: put at the end by what was imported since.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    added: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls) -> SearchPath:
        """Before anybody changed it: the program's folder is its first entry."""
        given = folders(os.environ.get("PYTHONPATH", ""))
        library = next(i for i, folder in enumerate(sys.path) if folder.endswith(".zip"))
        before = tuple(folder for folder in sys.path[1:library] if folder not in given)
        return cls(before, tuple(sys.path[library:]))

    def of(self, first: str, python_path: str) -> list[str]:
        """Of a new interpreter with ``first`` as its program's folder and that ``PYTHONPATH``."""
        given = folders(python_path)
        after = (folder for folder in self.after if folder not in given)
        return [first, *self.before, *given, *after, *self.added]

    def since_then(self) -> SearchPath:
        """With what this process's imports have put at the end."""
        length = sys.path.index(self.after[0]) + len(self.after)
        return replace(self, added=tuple(sys.path[length:]))


def folders(python_path: str) -> list[str]:
    """The entries of a ``PYTHONPATH``, each once."""
    entries = [os.path.abspath(entry) for entry in python_path.split(os.pathsep) if entry]
    return list(dict.fromkeys(entries))


def shadowed(path: list[str], known: list[str], loaded: Mapping[str, object]) -> str | None:
    """A loaded top-level module that a folder of ``path``, not of ``known``, has a file for."""
    for folder in path:
        if folder and folder not in known and Path(folder).is_dir():
            for entry in Path(folder).iterdir():
                name = entry.name.partition(".")[0]
                if name in loaded or name in ("sitecustomize", "usercustomize"):
                    return str(entry)
    return None
