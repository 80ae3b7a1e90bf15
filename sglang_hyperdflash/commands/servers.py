"""The servers of a learner: each version is sent to them, and the one before if it proves worse.

A server says on ``/metrics`` which version drafts and how many first drafts were accepted; it takes
a version by ``/update_weights_from_disk``. One that started again, or later, has version 0, the
drafter of its start, and gets the current one. Nothing is kept on a server: if the learner ends, it
drafts on with what it has.
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentTypeError
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_hyperdflash.draft.published import Version, current, withdraw
from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, DRAFTER, POSITION
from sglang_hyperdflash.serving.scheduler.weight_updates import DRAFTER_FORMAT
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.server_process import key_headers, reason_of

PAUSE = 1.0  # seconds between two looks
SCRAPE, LOAD = 10.0, 300.0  # seconds that a server has to answer
RETRY = 60.0  # seconds after which a version that a server did not take is sent again
# First drafts that a version needs before another one may follow, and after which its trial is
# over: later on a change of the traffic would look like a worse drafter.
LEAST, TRIAL = 128, 2048
# The version of a server that does not answer.
AWAY = -1
# Rounds of one answer resemble each other: so many count as one draw. A drafter of which nothing is
# accepted drafts little, since the width follows: a few draws must do.
ALIKE, DEVIATIONS = 8.0, 3.0
FEWEST = 6 * ALIKE


class FirstDrafts(NamedTuple):
    """How many first drafts were verified, and how many of them accepted."""

    accepted: float
    drafted: float

    def __str__(self) -> str:
        return f"{self.accepted / max(self.drafted, 1):.3f} of {self.drafted:.0f}"


def worse(new: FirstDrafts, before: FirstDrafts) -> bool:
    """Whether the new drafter's first drafts are accepted clearly less often."""
    if min(new.drafted, before.drafted) < FEWEST:
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
    versions, counts = set(), {ACCEPTED: Counter[str](), DRAFTED: Counter[str]()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == DRAFTER:
                versions.add(int(sample.value))
            elif sample.name in counts and sample.labels[POSITION] == "1":
                # Other ranks of a group may export the same rounds.
                group = sample.labels.get("dp_rank", "")
                counts[sample.name] |= Counter({group: sample.value})
    if not versions:
        raise ValueError(f"found no {DRAFTER}. Serve HYPERDFLASH with --enable-metrics")
    totals = FirstDrafts(*(by_group.total() for by_group in counts.values()))
    return versions.pop() if len(versions) == 1 else None, totals


def server_url(text: str) -> str:
    """An address given on the command line, without its last slash."""
    if text.startswith(("http://", "https://")):
        return text.rstrip("/")
    raise ArgumentTypeError(f"expected a URL such as http://127.0.0.1:30000, found {text!r}")


class Servers:
    """Keeps servers at the version that is current in a folder, and judges it by their traffic.

    Args:
        urls: of the servers.
        published: folder of versions (``draft.published``).
        draft: the drafter that they started with, version 0.
        say: prints a line.

    Attributes:
        version: what they draft with, or are about to.
        previous: the version before it.
        recent: first drafts of ``version`` at each look, the last ``TRIAL`` or a few more.
        before: those of the version that it replaced, while it is on trial.
    """

    def __init__(
        self, urls: Iterable[str], published: Path, draft: Path, say: Callable[[str], None]
    ) -> None:
        self.urls = list(urls)
        self.published, self.draft, self._say = published, draft, say
        self.version = self.previous = self._newest()
        self.recent: deque[FirstDrafts] = deque()
        self.before: FirstDrafts | None = None
        self._counted: dict[str, tuple[int | None, FirstDrafts]] = {}
        self._failed: dict[str, tuple[int, float]] = {}  # the version, and when
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
        versions = {url: self._count(url) for url in self.urls}
        total, newest = self.total(), self._newest()
        if self.before is not None and worse(total, self.before):
            reason = (
                f"its first drafts were accepted less often ({total}) than those of version "
                f"{self.previous.number} before it ({self.before})."
            )
            if self.version.path.is_dir():
                withdraw(self.published, self.version.number, reason)
            self._say(f"version {self.version.number} is withdrawn: {reason}")
            self._switch(self.previous, None)
        elif newest.number > self.version.number and (
            total.drafted >= LEAST or all(map(self._has_failed, self.urls))
        ):
            self._switch(newest, total)
        elif total.drafted >= TRIAL:
            self.before = None
        if not self.version.path.is_dir():  # an old one, which the folder no longer keeps
            self._switch(self._newest(), None)
        for url, number in versions.items():
            if number not in (self.version.number, AWAY):
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

    def _count(self, url: str) -> int | None:
        """Add a server's first drafts since the last look; its version, or ``AWAY``."""
        wrong = ""
        try:
            version, counts = read_metrics(requests.get(f"{url}/metrics", timeout=SCRAPE).text)
        except requests.RequestException:
            wrong = "it does not answer"
        except ValueError as error:
            wrong = f"/metrics: {error}"
        if wrong:
            self._complain(url, wrong)
            self._failed.pop(url, None)  # it may be another one when it is back
            return AWAY
        earlier, last = self._counted.get(url, (None, counts))
        self._counted[url] = version, counts
        if version != self.version.number:
            return version
        if counts.drafted < last.drafted:  # it started again
            last = FirstDrafts(0, 0)
        if earlier == version and counts != last:
            new = FirstDrafts(counts.accepted - last.accepted, counts.drafted - last.drafted)
            self.recent.append(new)
            while self.total().drafted - self.recent[0].drafted > TRIAL:
                self.recent.popleft()
        return version

    def _send(self, url: str) -> None:
        """Let a server draft with the version, or say why it does not."""
        version = self.version
        if self._has_failed(url) and time.monotonic() - self._failed[url][1] < RETRY:
            return
        body = {"model_path": str(version.path.resolve()), "load_format": DRAFTER_FORMAT}
        body["token_step"] = version.number
        place, headers = f"{url}/update_weights_from_disk", key_headers()
        try:
            reply = requests.post(place, json=body, headers=headers, timeout=LOAD)
        except requests.RequestException:
            said = "it does not answer"
        else:
            said = "" if reply.ok else f"HTTP {reply.status_code}: {reason_of(reply.text)}"
        if said:
            self._failed[url] = version.number, time.monotonic()
            self._complain(url, f"version {version.number} was not taken: {said}")
        else:
            self._failed.pop(url, None)
            self._say(f"{url} drafts with version {version.number}")

    def _has_failed(self, url: str) -> bool:
        """Whether the server did not take the version when it was sent last."""
        return url in self._failed and self._failed[url][0] == self.version.number

    def _complain(self, about: str, what: str) -> None:
        """Say what is wrong, once until it changes."""
        if self._said.get(about) != what:
            self._said[about] = what
            self._say(f"{about}: {what}")
