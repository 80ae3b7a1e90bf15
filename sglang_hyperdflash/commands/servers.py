"""The servers of a learner: each gets every version, and the previous one if a version is worse.

A server reports on ``/metrics`` which version drafts and how many first drafts were accepted; it
takes a version by ``/update_weights_from_disk``. A server that was started again, or later, drafts
with version 0, the drafter of its command line, and gets the current version. Nothing is stored on
a server: after the learner's end it keeps the version that it has.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_hyperdflash.draft.published import DRAFTER_FORMAT, Version, current, withdraw
from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, DRAFTER, POSITION
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.server_process import key_headers, reason_of

PAUSE = 1.0  # seconds between two looks
SCRAPE, LOAD = 10.0, 300.0  # seconds that a server has to answer
RETRY = 60.0  # seconds after which a version that a server did not take is sent again
# First drafts that a version needs before another version may follow, and after which its trial is
# over: a change of the traffic would then look like a worse drafter.
LEAST, TRIAL = 128, 2048
AWAY = -1  # the version of a server that does not answer
# Rounds of one answer are correlated, so that 8 count as one draw of the test. A drafter whose
# drafts are never accepted drafts little, since the width follows: 6 draws must suffice.
ROUNDS_PER_DRAW, DEVIATIONS = 8.0, 3.0
FEWEST = 6 * ROUNDS_PER_DRAW


class FirstDrafts(NamedTuple):
    """The numbers of accepted and of verified first drafts."""

    accepted: float
    drafted: float

    def __str__(self) -> str:
        return f"{self.accepted / max(self.drafted, 1):.3f} of {self.drafted:.0f}"


def worse(new: FirstDrafts, old: FirstDrafts) -> bool:
    """Return whether the new drafter's first drafts are accepted significantly less often."""
    if min(new.drafted, old.drafted) < FEWEST:
        return False
    pooled = (new.accepted + old.accepted) / (new.drafted + old.drafted)
    variance = ROUNDS_PER_DRAW * pooled * (1 - pooled) * (1 / new.drafted + 1 / old.drafted)
    difference = old.accepted / old.drafted - new.accepted / new.drafted
    return difference > DEVIATIONS * math.sqrt(variance)


def read_metrics(text: str) -> tuple[int | None, FirstDrafts]:
    """Read a server's version, None if its groups of ranks differ, and its first drafts so far.

    Raises:
        ValueError: it is no page of metrics, or the server does not serve HYPERDFLASH.
    """
    versions, counts = set(), {ACCEPTED: Counter[str](), DRAFTED: Counter[str]()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == DRAFTER:
                versions.add(int(sample.value))
            elif sample.name in counts and sample.labels[POSITION] == "1":
                # All ranks of a group may export the same rounds.
                group = sample.labels.get("dp_rank", "")
                counts[sample.name] |= Counter({group: sample.value})
    if not versions:
        raise ValueError(f"found no {DRAFTER}. Serve HYPERDFLASH with --enable-metrics")
    totals = FirstDrafts(*(by_group.total() for by_group in counts.values()))
    return versions.pop() if len(versions) == 1 else None, totals


class Servers:
    """Keeps servers at a folder's current version, and judges the version by their traffic.

    Args:
        urls: the servers' addresses.
        published: folder of versions (``draft.published``).
        draft: the drafter that the servers started with, version 0.
        say: prints a line.

    Attributes:
        version: what the servers draft with, or are about to.
        previous: the version before ``version``.
        recent: first drafts of ``version`` at each look, the last ``TRIAL`` or a few more.
        replaced: first drafts of ``previous`` while ``version`` is on trial, otherwise None.
    """

    def __init__(
        self, urls: Iterable[str], published: Path, draft: Path, say: Callable[[str], None]
    ) -> None:
        self.urls = list(urls)
        self.published, self.draft, self._say = published, draft, say
        self.version = self.previous = self._newest()
        self.recent: deque[FirstDrafts] = deque()
        self.replaced: FirstDrafts | None = None
        # By URL: the version and the counts at the last look, the version that was not taken last
        # with its time, and the last complaint.
        self._counted: dict[str, tuple[int | None, FirstDrafts]] = {}
        self._not_taken: dict[str, tuple[int, float]] = {}
        self._complaints: dict[str, str] = {}

    def watch(self) -> None:
        """Look for as long as the process lives, whatever fails."""
        while True:
            try:
                self.look()
            except (HyperDFlashError, OSError) as error:  # of the folder: it may pass
                self._complain(str(self.published), str(error))
            time.sleep(PAUSE)

    def look(self) -> None:
        """Count first drafts, judge the version, and send versions to the servers that lack them.

        Raises:
            HyperDFlashError, OSError: the folder cannot be used now.
        """
        versions = {url: self._count(url) for url in self.urls}
        total, newest = self.total(), self._newest()
        if self.replaced is not None and worse(total, self.replaced):
            reason = (
                f"its first drafts were accepted less often ({total}) than those of version "
                f"{self.previous.number} before it ({self.replaced})."
            )
            if self.version.path.is_dir():
                withdraw(self.published, self.version.number, reason)
            self._say(f"version {self.version.number} is withdrawn: {reason}")
            self._switch(self.previous, None)
        elif newest.number > self.version.number and (
            total.drafted >= LEAST or all(map(self._was_not_taken, self.urls))
        ):
            self._switch(newest, total)
        elif total.drafted >= TRIAL:
            self.replaced = None
        if not self.version.path.is_dir():  # an old one, which the folder no longer keeps
            self._switch(self._newest(), None)
        for url, number in versions.items():
            if number not in (self.version.number, AWAY):
                self._send(url)

    def total(self) -> FirstDrafts:
        """Return the sum of ``recent``."""
        return FirstDrafts(
            sum(r.accepted for r in self.recent), sum(r.drafted for r in self.recent)
        )

    def _newest(self) -> Version:
        return current(self.published) or Version(0, self.draft)

    def _switch(self, version: Version, replaced: FirstDrafts | None) -> None:
        self.previous, self.version, self.replaced = self.version, version, replaced
        self.recent.clear()

    def _count(self, url: str) -> int | None:
        """Add a server's first drafts since the last look; return its version, or ``AWAY``."""
        failure = ""
        try:
            reply = requests.get(f"{url}/metrics", timeout=SCRAPE)
            if not reply.ok:
                raise ValueError(f"HTTP status {reply.status_code}")
            version, counts = read_metrics(reply.text)
        except requests.RequestException:
            failure = "it does not answer"
        except ValueError as error:
            failure = f"/metrics: {error}"
        if failure:
            self._complain(url, failure)
            self._not_taken.pop(url, None)  # when it is back, it may be another server
            return AWAY
        last_version, last = self._counted.get(url, (None, counts))
        self._counted[url] = version, counts
        if version != self.version.number:
            return version
        if counts.drafted < last.drafted:  # the server was started again
            last = FirstDrafts(0, 0)
        if last_version == version and counts != last:
            new = FirstDrafts(counts.accepted - last.accepted, counts.drafted - last.drafted)
            self.recent.append(new)
            while self.total().drafted - self.recent[0].drafted > TRIAL:
                self.recent.popleft()
        return version

    def _send(self, url: str) -> None:
        """Have a server draft with the version, or complain that it does not take it."""
        version = self.version
        if self._was_not_taken(url) and time.monotonic() - self._not_taken[url][1] < RETRY:
            return
        body = {"model_path": str(version.path.resolve()), "load_format": DRAFTER_FORMAT}
        body["token_step"] = version.number
        address, headers = f"{url}/update_weights_from_disk", key_headers()
        try:
            reply = requests.post(address, json=body, headers=headers, timeout=LOAD)
        except requests.RequestException:
            failure = "it does not answer"
        else:
            failure = "" if reply.ok else f"HTTP {reply.status_code}: {reason_of(reply.text)}"
        if failure:
            self._not_taken[url] = version.number, time.monotonic()
            self._complain(url, f"version {version.number} was not taken: {failure}")
        else:
            self._not_taken.pop(url, None)
            self._say(f"{url} drafts with version {version.number}")

    def _was_not_taken(self, url: str) -> bool:
        """Return whether the server did not take the version when it was sent last."""
        return url in self._not_taken and self._not_taken[url][0] == self.version.number

    def _complain(self, subject: str, complaint: str) -> None:
        """Print a complaint about a server or the folder, once until it changes."""
        if self._complaints.get(subject) != complaint:
            self._complaints[subject] = complaint
            self._say(f"{subject}: {complaint}")
