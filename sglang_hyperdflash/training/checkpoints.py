"""A stage's checkpoints, written by all processes while they train on.

``state-STEP`` is a folder of ``torch.distributed.checkpoint``, of which every process has written a
share; any number of processes reads it. It has that name only once it is whole.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sglang_hyperdflash.tools.atomic import write_failed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.process_group import ProcessGroup

FACTS = "facts"
PARTIAL, REPLACED = ".partial", ".replaced"


def saved_states(folder: Path) -> list[Path]:
    """The whole checkpoints ``state-STEP`` of a stage's folder, the last step's last."""
    return sorted((path for path in folder.glob("state-*") if not path.suffix), key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.stem.partition("-")[2])


def read_state(
    path: Path,
    into: Mapping[str, torch.Tensor] | None = None,
    *,
    begin: str = "",
    share: tuple[int, int] = (0, 1),
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A checkpoint's facts, and its tensors by name.

    Args:
        into: the tensors to read, which are overwritten; None for new ones on the CPU.
        begin: of the names of the new ones.
        share: this process and the number of processes, which divide the check of CRC-32s.

    Raises:
        HyperDFlashConfigError: a file is damaged, or a tensor is missing.
    """
    with _checked(path), warnings.catch_warnings(action="ignore"):  # that one process is meant
        reader = dcp.FileSystemReader(path)
        metadata = reader.read_metadata()
        if into is None:
            entries = metadata.state_dict_metadata.items()
            into = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in entries
                if name.startswith(begin) and name != FACTS
            }
        state = {**into, FACTS: ""}
        stored = [e for index, e in metadata.storage_data.items() if index.fqn in state]
        _check_crc(path, stored[share[0] :: share[1]])
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        return json.loads(state.pop(FACTS)), state


def check_state(path: Path, share: tuple[int, int]) -> None:
    """Check a process's share of a checkpoint's CRC-32s, and read no tensor.

    Raises:
        HyperDFlashConfigError: a file is damaged.
    """
    with _checked(path):
        stored = list(dcp.FileSystemReader(path).read_metadata().storage_data.values())
        _check_crc(path, stored[share[0] :: share[1]])


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Raise ``HyperDFlashConfigError`` for whatever reading a checkpoint raises."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise HyperDFlashConfigError(
            f"{path} is damaged: {_reason(error)}. Remove it and run the same command to resume "
            "from the checkpoint before it, or to restart this stage."
        ) from error


def _check_crc(path: Path, entries: Iterable[Any]) -> None:
    """Check what ``torch.load`` does not: every entry is an archive with CRC-32s.

    Seam: ``_StorageInfo`` of ``FileSystemWriter`` says where an entry is in which file.
    """
    for entry in entries:
        with (path / entry.relative_path).open("rb") as file:
            file.seek(entry.offset)
            with zipfile.ZipFile(io.BytesIO(file.read(entry.length))) as archive:
                if wrong := archive.testzip():
                    raise ValueError(f"the CRC-32 of {wrong} is not the one it was written with")


def _reason(error: BaseException) -> str:
    """Of the first process that failed."""
    for cause, _ in getattr(error, "failures", {}).values():
        error = cause
    return str(error).splitlines()[0] if str(error) else repr(error)


class Checkpoints:
    """Writes the checkpoints of one stage, one at a time.

    Args:
        folder: of the stage. keep: the number of checkpoints kept, the last ones.
    """

    def __init__(self, folder: Path, world: ProcessGroup, keep: int) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._written: Future | None = None
        self._finished: Future | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        if world.is_main:
            for left_over in folder.glob(f"state-*{PARTIAL}"):
                shutil.rmtree(left_over)
            for old in folder.glob(f"state-*{REPLACED}"):
                whole = old.with_suffix("")
                shutil.rmtree(old) if whole.is_dir() else old.rename(whole)
        # Of the last one: file systems of other nodes may show names late.
        self.step = max(map(step_of, saved_states(folder)), default=None)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, Any],
        best: int,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state to the host, and begin to write it. Every process calls this.

        Args:
            tensors: the same on all processes. facts: JSON.
            best: the step of a checkpoint that is kept, too; 0 for none.
            then: what the main process does before the checkpoint gets its name, in another thread;
                without it, a checkpoint of that step stays if it is there.

        Raises:
            As :meth:`wait`, of the checkpoint before.
        """
        self.wait()
        if step == self.step and then is None:
            return
        self.step, path = step, self.folder / f"state-{step}"
        names = sorted(tensors)[self.world.rank :: self.world.size]
        share: dict[str, Any] = {name: tensors[name] for name in names}
        if self.world.is_main:
            share[FACTS] = json.dumps(facts)
        partial = path.with_name(path.name + PARTIAL)
        with warnings.catch_warnings(action="ignore"):
            self._written = dcp.async_save(
                share,
                storage_writer=dcp.FileSystemWriter(partial),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                process_group=self.world.background,
                no_dist=self.world.size == 1,
            )
        if self.world.is_main:
            self._finished = self._thread.submit(
                self._finish, self._written, path, partial, best, then
            )

    def _finish(
        self, written: Future, path: Path, partial: Path, best: int, then: Callable | None
    ) -> None:
        try:
            written.result()
        except CheckpointException:
            return  # which every process raises
        if then is not None:
            then()
        old = path.with_suffix(REPLACED)
        if path.is_dir():  # without a record, which this one has
            path.rename(old)
        partial.replace(path)
        shutil.rmtree(old, ignore_errors=True)
        for old in saved_states(self.folder)[: -self.keep]:
            if not best or step_of(old) != best:
                shutil.rmtree(old)

    def wait(self) -> None:
        """Wait until the last checkpoint is whole; every process calls this.

        Raises:
            WriteFailed: it could not be written, on the main process.
            SystemExit: of code 2, on the others.
        """
        if self._written is None:
            return
        written, self._written = self._written, None
        finished, self._finished = self._finished, None

        def settle() -> None:
            try:
                written.result()
            except CheckpointException as error:
                raise write_failed(self.folder, OSError(_reason(error))) from error
            finished.result()

        futures.wait([written])  # before the group is used again
        self.world.on_main(settle)
