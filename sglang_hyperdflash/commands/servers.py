"""The servers of a learner: they get its versions, and the one before where a new one is worse.

A server says on ``/metrics`` which version drafts and how many first drafts were accepted; it takes
a version by ``/update_weights_from_disk``. One that started again, or later, has version 0, the
drafter of its start, and gets the current one. Nothing is kept on a server: if the learner ends, it
drafts on with what it has.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_hyperdflash.draft.published import Version, current, refuse
from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, DRAFTER, POSITION
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.server_process import key_headers

PAUSE = 1.0  # seconds between two looks
SCRAPE, LOAD = 10.0, 600.0  # seconds that a server has to answer
# First drafts that a version needs before another one may follow, and after which its trial is
# over: later on a change of the traffic would look like a worse drafter.
LEAST, TRIAL = 128, 2048
# Rounds of one answer resemble each other: so many count as one draw.
ALIKE, DEVIATIONS = 8.0, 3.0


class FirstDrafts(NamedTuple):
    """How many first drafts were verified, and how many of them accepted."""

    accepted: float
    drafted: float

    def __str__(self) -> str:
        return f"{self.accepted / max(self.drafted, 1):.3f} of {self.drafted:.0f}"


def worse(new: FirstDrafts, before: FirstDrafts) -> bool:
    """Whether the new drafter's first drafts are accepted clearly less often."""
    if min(new.drafted, before.drafted) < LEAST:
        return False
    both = (new.accepted + before.accepted) / (new.drafted + before.drafted)
    variance = ALIKE * both * (1 - both) * (1 / new.drafted + 1 / before.drafted)
    difference = before.accepted / before.drafted - new.accepted / new.drafted
    return difference > DEVIATIONS * math.sqrt(variance)


def read_metrics(text: str) -> tuple[int | None, FirstDrafts]:
    """The version that drafts on a server, None where groups differ; first drafts so far.

    Raises:
        ValueError: it is no page of metrics, or of a server without HYPERDFLASH.
    """
    versions, counts = set(), {ACCEPTED: 0.0, DRAFTED: 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == DRAFTER:
                versions.add(int(sample.value))
            elif sample.name in counts and sample.labels[POSITION] == "1":
                counts[sample.name] += sample.value
    if not versions:
        raise ValueError(f"found no {DRAFTER}. Serve HYPERDFLASH with --enable-metrics")
    return versions.pop() if len(versions) == 1 else None, FirstDrafts(*counts.values())


class Servers:
    """Keeps servers at the version that is current in a folder, and judges it by their traffic.

    Args:
        urls: of the servers. published: folder of versions (``draft.published``).
        draft: the drafter that they started with, version 0. say: prints a line.

    Attributes:
        version: what they draft with, or are about to.
        previous: the version before it.
        recent: first drafts of ``version`` at each look, the last ``TRIAL`` or a few more.
        before: those of the version that it replaced, while it is on trial.
    """

    def __init__(
        self, urls: Iterable[str], published: Path, draft: Path, say: Callable[[str], None]
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.published, self.draft, self._say = published, draft, say
        self.version = self.previous = self._newest()
        self.recent: deque[FirstDrafts] = deque()
        self.before: FirstDrafts | None = None
        self._counted: dict[str, tuple[int | None, FirstDrafts]] = {}
        self._refused: set[tuple[str, int]] = set()
        self._said: dict[str, str] = {}

    def watch(self) -> None:
        """Look for as long as the process lives, whatever happens."""
        while True:
            try:
                self.look()
            except (HyperDFlashError, OSError) as error:  # of the folder: it may pass
                self._complain(str(self.published), str(error))
            time.sleep(PAUSE)

    def look(self) -> None:
        """Count, judge, and send what servers lack.

        Raises:
            HyperDFlashError, OSError: the folder cannot be used now.
        """
        behind = [url for url in self.urls if self._count(url)]
        total, newest = self.total(), self._newest()
        if self.before is not None and worse(total, self.before):
            reason = (
                f"its first drafts were accepted less often ({total}) than those of version "
                f"{self.previous.number} before it ({self.before})."
            )
            refuse(self.published, self.version.number, reason)
            self._say(f"version {self.version.number} is left: {reason}")
            self._switch(self.previous, None)
            behind = self.urls
        elif total.drafted >= LEAST and newest.number > self.version.number:
            self._switch(newest, total)
            behind = self.urls
        elif total.drafted >= TRIAL:
            self.before = None
        if not self.version.path.is_dir():  # an old one, which the folder no longer keeps
            self._switch(self._newest(), None)
        for url in behind:
            self._send(url)

    def total(self) -> FirstDrafts:
        """First drafts of the version, as far as they are remembered."""
        return FirstDrafts(
            sum(r.accepted for r in self.recent), sum(r.drafted for r in self.recent)
        )

    def _newest(self) -> Version:
        return current(self.published) or Version(0, self.draft)

    def _switch(self, version: Version, before: FirstDrafts | None) -> None:
        self.previous, self.version, self.before = self.version, version, before
        self.recent.clear()

    def _count(self, url: str) -> bool:
        """Add a server's first drafts since the last look; whether it lacks the version."""
        try:
            version, counts = read_metrics(requests.get(f"{url}/metrics", timeout=SCRAPE).text)
        except requests.RequestException:
            return self._complain(url, "it does not answer")
        except ValueError as error:
            return self._complain(url, f"{url}/metrics: {error}")
        self._said.pop(url, None)
        earlier, last = self._counted.get(url, (None, counts))
        self._counted[url] = version, counts
        if version != self.version.number:
            return True
        if counts.drafted < last.drafted:  # it started again
            last = FirstDrafts(0, 0)
        if earlier == version and counts != last:
            new = FirstDrafts(counts.accepted - last.accepted, counts.drafted - last.drafted)
            self.recent.append(new)
            while self.total().drafted - self.recent[0].drafted > TRIAL:
                self.recent.popleft()
        return False

    def _send(self, url: str) -> None:
        """Let a server draft with the version; one that it refuses is not sent again."""
        version = self.version
        if (url, version.number) in self._refused:
            return
        body = {"model_path": str(version.path.resolve()), "token_step": version.number}
        place, headers = f"{url}/update_weights_from_disk", key_headers()
        try:
            reply = requests.post(place, json=body, headers=headers, timeout=LOAD)
        except requests.RequestException:
            self._complain(url, "it does not answer")
            return
        if reply.ok:
            self._say(f"{url} drafts with version {version.number}")
        else:
            self._refused.add((url, version.number))
            self._say(f"{url} refuses version {version.number}: {reply.text[:400]}")

    def _complain(self, about: str, what: str) -> bool:
        """Say what is wrong, once until it changes; False."""
        if self._said.get(about) != what:
            self._said[about] = what
            self._say(f"{about}: {what}")
        return False
