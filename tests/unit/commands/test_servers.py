"""Which version the servers of a learner draft with: sent, judged by their traffic, taken back."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.commands import servers as module
from sglang_hyperdflash.commands.servers import LEAST, TRIAL, FirstDrafts, Servers, worse
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, DRAFTER


class Remote:
    """A server as far as it is asked; drafts of version n are accepted with ``rates[n]``."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates, self.rng, self.up = rates, random.Random(0), True
        self.refuses: set[int] = set()
        self.loads: list[int] = []
        self.start()

    def start(self) -> None:
        self.version, self.accepted, self.drafted = 0, 0, 0

    def draft(self, rounds: int = 2 * LEAST) -> None:
        self.drafted += rounds
        self.accepted += sum(self.rng.random() < self.rates[self.version] for _ in range(rounds))

    def metrics(self) -> str:
        lines = [f'{DRAFTER}{{tp_rank="0"}} {self.version}']
        for name, value in ((ACCEPTED, self.accepted), (DRAFTED, self.drafted)):
            lines.append(f'{name}{{position="1",tp_rank="0"}} {value}')
            lines.append(f'{name}{{position="2",tp_rank="0"}} 7.0')
        return "\n".join([*lines, ""])

    def load(self, body: dict) -> tuple[int, str]:
        number = body["token_step"]
        self.loads.append(number)
        if number in self.refuses:
            return 400, "it does not fit"
        self.version = number
        return 200, ""


class Case:
    """A learner's servers, reached as any HTTP server, and what was said."""

    def __init__(self, folder: Path, drafter: Path, *rates: float) -> None:
        self.folder, self.drafter, self.said = folder, drafter, list[str]()
        self.urls = ["http://a:1", "http://b:2"]
        self.remotes = [Remote(dict(enumerate(rates))) for _ in self.urls]

    def answer(self, address: str, json: dict | None = None, **_) -> requests.Response:
        url, _, name = address.rpartition("/")
        remote = self.remotes[self.urls.index(url)]
        if not remote.up:
            raise requests.ConnectionError("refused")
        reply, loads = requests.Response(), name == "update_weights_from_disk"
        reply.status_code, text = remote.load(json) if loads else (200, remote.metrics())
        reply._content = text.encode()
        return reply

    def begin(self) -> None:
        self.servers = Servers(self.urls, self.folder, self.drafter, self.said.append)
        self.servers.look()

    def publish(self) -> int:
        return publish(self.folder, self.drafter)

    def traffic(self, looks: int = 1, rounds: int = 2 * LEAST) -> None:
        for _ in range(looks):
            for one in self.remotes:
                one.draft(rounds)
            self.servers.look()

    def versions(self) -> list[int]:
        return [one.version for one in self.remotes]


@pytest.fixture
def new_case(tmp_path, drafter_dir, monkeypatch) -> Callable[..., Case]:
    def made(*rates: float) -> Case:
        case = Case(tmp_path / "published", drafter_dir, *rates)
        monkeypatch.setattr(module.requests, "get", case.answer)
        monkeypatch.setattr(module.requests, "post", case.answer)
        case.begin()
        return case

    return made


def test_a_worse_version_is_left_for_the_one_before_it_and_never_sent_again(new_case):
    case = new_case(0.6, 0.6, 0.1, 0.7)
    case.publish()
    case.servers.look()
    assert case.versions() == [0, 0], "the drafter of the start is not measured yet"
    case.traffic(2)
    assert case.versions() == [1, 1]
    case.traffic(4)
    case.publish()
    case.traffic()
    assert case.versions() == [2, 2]
    case.traffic(2)
    assert case.versions() == [1, 1] and current(case.folder).number == 1
    assert sum("version 2 is withdrawn" in line for line in case.said) == 1
    case.traffic(3)
    assert case.versions() == [1, 1] and [one.loads for one in case.remotes] == [[1, 2, 1]] * 2
    case.publish()
    case.traffic(2)
    assert case.versions() == [3, 3]
    case.begin()  # the learner was killed
    case.traffic(3)
    assert case.versions() == [3, 3] and case.remotes[0].loads == [1, 2, 1, 3]


def test_a_newer_version_waits_until_the_one_before_a_worse_one_is_measured(new_case):
    case = new_case(0.6, 0.6, 0.0, 0.0)
    case.publish()
    case.traffic(6)
    case.publish()
    case.traffic()
    case.publish()
    case.traffic(2)
    assert case.versions() == [1, 1] and case.servers.version.number == 1
    case.traffic(2)
    assert case.versions() == [3, 3]
    case.traffic(2)
    assert case.versions() == [1, 1] and case.remotes[0].loads == [1, 2, 1, 3, 1]


def test_versions_that_the_folder_no_longer_has_are_not_sent(new_case):
    case = new_case(0.6, 0.6, 0.6, 0.6, 0.6, 0.6)
    case.publish()
    case.traffic(2)
    for _ in range(4):
        case.publish()
    case.remotes[0].start()
    case.servers.look()
    assert case.versions()[0] == 5


def test_the_start_s_drafter_is_returned_to(new_case):
    case = new_case(0.6, 0.0)
    case.traffic(3)
    case.publish()
    case.traffic()
    assert case.versions() == [1, 1]
    case.traffic(2)
    assert case.versions() == [0, 0] and current(case.folder) is None


def test_other_traffic_is_no_worse_drafter_once_the_trial_is_over(new_case):
    case = new_case(0.8, 0.8)
    case.publish()
    case.traffic(3)
    case.traffic(3, TRIAL)
    for one in case.remotes:
        one.rates[1] = 0.2
    case.traffic(3, TRIAL)
    assert case.versions() == [1, 1]


def test_one_that_was_away_or_drafts_nothing_gets_the_current_version(new_case):
    """Such as a prefill node; one that starts again has the drafter of its start."""
    case = new_case(0.6, 0.6)
    first, second = case.remotes
    second.up = False
    case.publish()
    for _ in range(3):
        first.draft()
        case.servers.look()
    assert case.versions() == [1, 0] and sum("does not answer" in line for line in case.said) == 1
    second.up = True
    case.servers.look()
    assert case.versions() == [1, 1]
    case.traffic(2)
    before = case.servers.total()
    first.start()
    case.servers.look()
    assert case.versions() == [1, 1] and case.servers.total() == before
    case.servers.look()
    first.draft(50)
    case.servers.look()
    assert case.servers.total().drafted == before.drafted + 50


def test_what_a_server_does_not_take_is_said_once_and_sent_again_later(new_case, monkeypatch):
    case = new_case(0.5, 0.5)
    case.remotes[0].refuses.add(1)
    case.publish()
    case.traffic(4)
    assert case.versions() == [0, 1] and case.remotes[0].loads == [1]
    assert sum("version 1 was not taken" in line and "not fit" in line for line in case.said) == 1
    monkeypatch.setattr(module, "RETRY", 0.0)
    case.traffic(2)
    assert len(case.said) == 2 and len(case.remotes[0].loads) == 3
    case.remotes[0].refuses.clear()
    case.traffic(1)
    assert case.versions() == [1, 1]


def test_a_version_that_no_server_takes_is_passed_by(new_case):
    case = new_case(0.5, 0.5, 0.5)
    for one in case.remotes:
        one.refuses.add(1)
    case.publish()
    case.traffic(3)
    case.publish()
    case.traffic(1)
    assert case.versions() == [2, 2]


def test_groups_of_ranks_add_up_and_ranks_of_a_group_do_not():
    def page(version: int) -> str:
        lines = []
        for tp, dp in product(range(4), range(2)):
            labels = f'tp_rank="{tp}",dp_rank="{dp}"'
            lines.append(f"{DRAFTER}{{{labels}}} {dp * version}")
            for name in (ACCEPTED, DRAFTED):
                lines.append(f'{name}{{position="1",{labels}}} {5 + dp}')
        return "\n".join([*lines, ""])

    assert module.read_metrics(page(0)) == (0, FirstDrafts(11, 11))
    assert module.read_metrics(page(1))[0] is None, "one group has another drafter"


def test_only_a_clear_difference_counts():
    def is_worse(new: float, before: float, drafts: int) -> bool:
        return worse(FirstDrafts(new * drafts, drafts), FirstDrafts(before * TRIAL, TRIAL))

    assert is_worse(0.0, 0.8, 48) and not is_worse(0.0, 0.8, 47) and not is_worse(0.3, 0.8, 48)
    assert is_worse(0.0, 0.4, LEAST)
    assert not is_worse(0.3, 0.6, LEAST) and is_worse(0.3, 0.6, 1024)
    assert not is_worse(0.6, 0.7, TRIAL) and is_worse(0.55, 0.7, TRIAL)
    assert not is_worse(1, 0.5, TRIAL)


def test_traffic_that_says_nothing_of_drafters_is_a_line_not_an_end(new_case):
    case = new_case(0.5)
    case.remotes[0].metrics = lambda: "# TYPE other gauge\nother 1.0\n"
    case.traffic(3)
    assert sum("--enable-metrics" in line for line in case.said) == 1
    (case.folder).mkdir()
    (case.folder / "current").write_text("nonsense")
    with pytest.raises(module.HyperDFlashError):
        case.traffic()
