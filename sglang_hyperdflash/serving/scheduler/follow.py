"""A server that follows a folder of published drafters, and leaves one that is worse than before.

On every rank a thread reads the newest version into host memory. Rank 0 then adds a request to
those that its scheduler receives: SGLang's broadcast brings it to all ranks at the same iteration,
where the weights are replaced between two rounds. Nothing is flushed; a request waits for one copy
at most. A version is on trial at first (:mod:`.guard`); only then may another one follow. A prefill
node of a disaggregated server drafts nothing: it writes K/V with every version as it comes, until
that is marked as left and another one is current.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.draft.checkpoint import checked_tensors, expected_tensors, weight_files
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import Version, current, refuse
from sglang_hyperdflash.seams import after
from sglang_hyperdflash.serving.drafting.replace import in_own_memory
from sglang_hyperdflash.serving.scheduler.guard import Guard, worse
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

logger = logging.getLogger(__name__)

FOLLOW = "HYPERDFLASH_FOLLOW"
# Seconds between two looks at the folder, and between two requests to serve one version.
PAUSE = 1.0
READY, LOADING = "ready", "loading"


@dataclass(frozen=True)
class ServeVersion:
    """A request of rank 0 to all ranks: draft with this version from the next round on.

    Attributes:
        returns: whether it is the one before, because the one in use is worse.
    """

    number: int
    returns: bool = False


@dataclass
class Drafter:
    """A version in host memory; number 0 is the drafter that the server started with."""

    number: int
    tensors: Mapping[str, torch.Tensor]
    guard: Guard = field(default_factory=Guard)


def read(version: Version, model: Any) -> dict[str, torch.Tensor]:
    """A published version's tensors in host memory, for the served draft ``model``.

    Raises:
        HyperDFlashConfigError: it is damaged, or was made for another target, shape or block size.
        OSError, RuntimeError: it cannot be read, or held in memory, now.
    """
    version.check()
    found, served = load_config(version.path), model.hyperdflash_config
    for name in (each.name for each in fields(served)):
        ours, theirs = getattr(served, name), getattr(found, name)
        if ours != theirs:
            raise HyperDFlashConfigError(
                f"expected a drafter with {name}={ours}, as the one that is served; found {theirs}."
            )
    expected = expected_tensors(model.raw_config, served)
    try:
        tensors = (pair for file in weight_files(version.path) for pair in load_file(file).items())
        pinned = model.norm.weight.is_cuda
        return in_own_memory(checked_tensors(tensors, expected), pinned)
    except SafetensorError as error:
        raise HyperDFlashConfigError(f"{version.path} cannot be read: {error}.") from error


class Follower:
    """What one rank knows of the versions.

    Args:
        folder: of ``draft.published``. worker: the ``HyperDFlashWorker``.
        leads: whether this is rank 0, which asks and logs.
        gather: what every rank says, as a list; None without other ranks.
        drafts: whether this node does; else no version has a trial.

    Attributes:
        serving: the drafter in use; before: the one to return to if ``serving`` is worse.
        ready: the next one, or None.
        refused: versions that are not taken, and why.
    """

    def __init__(
        self,
        folder: Path,
        worker: Any,
        leads: bool = True,
        gather: Callable[[str], list[str]] | None = None,
        drafts: Callable[[], bool] = lambda: True,
    ) -> None:
        self.folder, self.worker, self.leads = folder, worker, leads
        self._gather, self._drafts = gather or (lambda said: [said]), drafts
        self.serving = Drafter(0, worker.draft_model.first)
        self.before: Drafter | None = None
        self.ready: Drafter | None = None
        self.refused: dict[int, str] = {}
        self._returns, self._next, self._complaint = False, 0.0, ""
        self._left: tuple[int, str] | None = None
        worker.width_control.trial = True

    def watch(self) -> None:
        """Look at the folder for as long as the process lives, whatever it finds there."""
        if self.worker.device != "cpu":
            # Pinned memory belongs to a device's context: this thread's is not rank 0's.
            torch.get_device_module(self.worker.device).set_device(self.worker.gpu_id)
        while True:
            try:
                self.look()
            except Exception as error:  # a file system's, of pinned memory, ...: it may pass
                if self.leads and str(error) != self._complaint:
                    logger.warning("HYPERDFLASH: looking for a drafter failed: %r", error)
                self._complaint = str(error)
            time.sleep(PAUSE)

    def look(self) -> None:
        """Read the newest version, unless it is known, and say which one was left.

        Raises:
            HyperDFlashError, OSError, RuntimeError: the folder cannot be used now.
        """
        if self._left is not None:
            left, self._left = self._left, None  # tried once: it may be read-only
            refuse(self.folder, *left)
        newest = current(self.folder)
        known = {self.serving.number, self.ready and self.ready.number, *self.refused}
        if newest is None or newest.number in known:
            return
        try:
            ready = Drafter(newest.number, read(newest, self.worker.draft_model))
        except HyperDFlashConfigError as error:
            self._refuse(newest.number, str(error))
        else:
            self.ready = ready

    def _refuse(self, number: int, reason: str) -> None:
        self.refused[number] = reason
        if self.leads:
            logger.warning("HYPERDFLASH: drafter version %d is not taken: %s", number, reason)

    def next_request(self) -> ServeVersion | None:
        """What rank 0 asks of all ranks now."""
        if self._returns:
            return ServeVersion(self.before.number, returns=True)
        ready, now = self.ready, time.monotonic()
        on_trial = self.serving.guard.recent is None and self._drafts()
        if ready is None or on_trial or now < self._next:
            return None
        self._next = now + PAUSE
        return ServeVersion(ready.number)

    def serve(self, request: ServeVersion) -> None:
        """Replace the drafter's weights if all ranks have the version; the same on every rank.

        Seam: the scheduler's dispatcher sends no answer where a handler returns None.
        """
        if request.returns:
            self._return()
            return
        number, ready = request.number, self.ready  # another thread sets it
        ready = ready if ready and ready.number == number else None
        said = self._gather(self.refused.get(number, READY if ready else LOADING))
        reasons = [one for one in said if one not in (READY, LOADING)]
        if reasons:
            self.ready = None
            self._refuse(number, reasons[0])
        elif LOADING not in said:
            self.before, self.serving, self.ready = self.serving, ready, None
            self._replace()
            if self.leads:
                logger.info("HYPERDFLASH: drafting with version %d of %s", number, self.folder)

    def _return(self) -> None:
        """Back to the drafter before; asked once more, there is none."""
        left, before, self._returns = self.serving, self.before, False
        if before is None:
            return
        reason = (
            f"its first drafts were accepted less often ({left.guard.recent}) than those of "
            f"version {before.number} ({before.guard.recent}), which drafts again."
        )
        self._refuse(left.number, reason)
        if self.leads:
            self._left = left.number, reason
        self.serving, self.before = before, None
        self._replace()

    def _replace(self) -> None:
        self.worker.draft_model.replace_weights(self.serving.tensors)
        self.serving.guard.begin()
        self.worker.width_control.trial = self.serving.guard.recent is None

    def learn(self, width: int, live: Sequence[tuple[Any, int]]) -> None:
        """A round's result; the end of a trial decides whether the version stays."""
        guard = self.serving.guard
        on_trial = guard.recent is None
        guard.learn(width, live)
        if on_trial and guard.recent is not None:
            self.worker.width_control.trial = False
            # With attention data parallelism ranks have counted other requests: rank 0 decides.
            before = self.before.guard.recent if self.leads and self.before else None
            self._returns = before is not None and worse(guard.recent, before)


# None in a process that follows no folder.
_follower: Follower | None = None


def version() -> int:
    """The version that drafts now."""
    return _follower.serving.number if _follower else 0


def learn(width: int, live: Sequence[tuple[Any, int]]) -> None:
    """A round's result: requests that had not finished, with their accepted drafts."""
    if _follower is not None:
        _follower.learn(width, live)


@after("sglang.srt.managers.scheduler:Scheduler.init_request_dispatcher", "9bcbd841c9d2")
def start_following(_, self) -> None:
    """Follow the folder of ``HYPERDFLASH_FOLLOW``, and dispatch what rank 0 asks.

    Seam: ``GroupCoordinator.all_gather_object``; control requests reach all ranks of this group.
    """
    global _follower
    folder = os.environ.get(FOLLOW)
    if not (folder and is_ours(self.spec_algorithm)):
        return
    from sglang.srt.runtime_context import get_disagg, get_parallel
    from sglang.utils import TypeBasedDispatcher

    group = get_parallel().tp_group
    gather = group.all_gather_object if group.world_size > 1 else None
    leads = get_parallel().tp_rank == 0

    def drafts() -> bool:  # a node may change its role
        return get_disagg().disaggregation_mode != "prefill"

    _follower = Follower(Path(folder), self.model_worker, leads, gather, drafts)
    self._request_dispatcher += TypeBasedDispatcher([(ServeVersion, _follower.serve)])
    threading.Thread(target=_follower.watch, name="hyperdflash-follow", daemon=True).start()


@after(
    "sglang.srt.managers.scheduler_components.request_receiver"
    ":SchedulerRequestReceiver._pull_raw_reqs",
    "ee5021a90e29",
)
def add_own_request(requests: list | None, self) -> list | None:
    """What rank 0 received, and what it asks of all ranks: SGLang broadcasts both."""
    if _follower is not None and _follower.leads and requests is not None:
        own = _follower.next_request()
        return requests if own is None else [*requests, own]
    return requests
