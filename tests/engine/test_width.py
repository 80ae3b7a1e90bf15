"""A width that follows load: the baseline's answers, and a start that leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.serving.scheduler.metrics import REQUESTS, SECONDS, WIDTH_ROUNDS
from sglang_hyperdflash.serving.width.settings import ADAPTIVE, FULL, RANDOM, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.asking import FEW, assert_cases, by_label, samples
from tests.engine.conftest import FP32, TOOL_CALLS, greedy_all, ids, probed
from tests.engine.drafters import with_window

pytestmark = pytest.mark.xdist_group("pair")
EVERY = {WIDTHS: "1,2,4,7"}
# As of ``hyper_server``, whose state is compared.
ARGUMENTS = (*FP32, *TOOL_CALLS, "--enable-metrics", "--random-seed", "7")


def test_a_server_that_times_its_rounds(
    servers, hyper_server, target_dir, drafter_dir, own_prompts, baseline, probe_folder, tmp_path
):
    """It has all but the table of seconds in common with one that has timed nothing."""
    environment = {WIDTH: ADAPTIVE, **EVERY} | probed(tmp_path)
    arguments = (*ARGUMENTS, *hyperdflash_arguments(drafter_dir))
    server = servers.get("adaptive", target_dir, *arguments, environment=environment)
    states = [json.loads((f / "state.json").read_text()) for f in (probe_folder, tmp_path)]
    assert states[0] == states[1]
    assert states[0]["row tokens"] == states[0]["target layers with K/V"] == 0
    timed = [{int(dict(k)[REQUESTS]) for k in samples(s, SECONDS)} for s in (server, hyper_server)]
    assert timed == [{1, 4}, set()]
    assert ids(greedy_all(server, own_prompts, 8)) == baseline["own"]
    assert_cases(server, FEW, own_prompts, baseline)
    rounds, seconds = (by_label(server, name, "width") for name in (WIDTH_ROUNDS, SECONDS))
    assert sum(rounds.values()) and sorted(rounds) == ["1", "2", "4", "7"]
    assert all(seconds[width] > 0 for width in rounds)
    servers.stop("adaptive")


@pytest.mark.slow
def test_timing_a_window_leaves_nothing(servers, target_dir, drafter_dir, tmp_path):
    draft, states = with_window(drafter_dir, tmp_path / "narrow", 32), []
    for width in (ADAPTIVE, FULL):
        folder = tmp_path / width
        folder.mkdir()
        environment = {WIDTH: width, **EVERY, POOL_RATIO: "0.0068"} | probed(folder)
        arguments = (*ARGUMENTS, "--max-running-requests", "8", *hyperdflash_arguments(draft))
        servers.get("timing", target_dir, *arguments, environment=environment)
        servers.stop("timing")
        states.append(json.loads((folder / "state.json").read_text()))
    assert states[0] == states[1] and states[0]["window"] == 0


FORMS = {
    **{f"width {width}": ((), {WIDTH: str(width)}) for width in (1, 2, 4)},
    "synchronous": (("--disable-overlap-schedule",), {WIDTH: RANDOM, **EVERY}),
    "window": (
        ("--max-running-requests", "8"),
        {WIDTH: RANDOM, POOL_RATIO: "0.0068", **EVERY},
    ),
    "default": ((), {WIDTH: ""}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_other_ways_to_serve(
    servers, target_dir, drafter_dir, own_prompts, baseline, tmp_path, form
):
    draft, (arguments, environment) = drafter_dir, FORMS[form]
    if form == "window":
        draft = with_window(drafter_dir, tmp_path / "narrow", 32)
    arguments = (*FP32, "--enable-metrics", *arguments, *hyperdflash_arguments(draft))
    server = servers.get("width", target_dir, *arguments, environment=environment)
    for _ in range(2):
        assert_cases(server, ["mixed"], own_prompts, baseline)
        found = greedy_all(server, own_prompts, 8)
        assert ids(found) == baseline["own"]
    if form.startswith("width"):
        histograms = [a["meta_info"].get("spec_correct_drafts_histogram", []) for a in found]
        assert max(map(len, histograms)) == int(form[-1])
    if form == "default":
        assert sorted(by_label(server, WIDTH_ROUNDS, "width")) == ["1", "7"]
    servers.stop("width")
