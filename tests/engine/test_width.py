"""A width that follows load: the baseline's answers, and a start that leaves nothing behind."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.serving.scheduler.metrics import REQUESTS, SECONDS, WIDTH_ROUNDS
from sglang_hyperdflash.serving.settings import ADAPTIVE, FULL, POOL_RATIO, RANDOM, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine import test_sampling
from tests.engine.asking import FEW, UNPROCESSED, assert_cases, by_label, samples
from tests.engine.conftest import FP32, TOOL_CALLS, greedy_all, ids, probed
from tests.engine.drafters import poisoned, with_window

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
contexts = test_sampling.contexts  # a fixture
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
    timed = [{int(dict(k)[REQUESTS]) for k in samples(s, SECONDS)} for s in (server, hyper_server)]
    assert timed == [{1, 4}, set()]
    assert ids(greedy_all(server, own_prompts, 8)) == baseline["own"]
    assert_cases(server, FEW, own_prompts, baseline)
    rounds, seconds = (by_label(server, name, "width") for name in (WIDTH_ROUNDS, SECONDS))
    assert sum(rounds.values()) and sorted(rounds) == ["1", "2", "4", "7"]
    assert all(seconds[width] > 0 for width in rounds)
    servers.stop("adaptive")


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


FEW_REQUESTS = ("--max-running-requests", "8")
NARROW, RANDOMLY = {POOL_RATIO: "0.0068"}, {WIDTH: RANDOM, **EVERY}
RANKS, SYNCHRONOUS = ("--tp-size", "2"), ("--disable-overlap-schedule",)
# How the committed drafter is changed, arguments and environment.
FORMS = {
    **{f"width {width}": ("", (), {WIDTH: str(width)}) for width in (1, 2, 4)},
    "synchronous": ("", SYNCHRONOUS, RANDOMLY),
    "window": ("window", FEW_REQUESTS, RANDOMLY | NARROW),
    "default": ("", (), {WIDTH: ""}),
    "two ranks": ("", RANKS, RANDOMLY),
    "two adaptive ranks": ("", RANKS, {WIDTH: ADAPTIVE, **EVERY}),
    "two ranks of a window": ("window", (*RANKS, *FEW_REQUESTS), NARROW),
    # Drafts that are nearly never right.
    "random": ("random", ("--enable-deterministic-inference", *SYNCHRONOUS), {}),
    # The weights are finite, their products are not: nothing refuses them.
    "nan": ("nan", (), {}),
}


def changed(drafter: Path, folder: Path, change: str) -> Path:
    if change == "random":
        return poisoned(drafter, folder)
    with_window(drafter, folder, 32 if change == "window" else None)
    if change == "nan":
        tensors = load_file(folder / "model.safetensors")
        tensors["norm.weight"].fill_(3e38)
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_other_ways_to_serve(
    servers, contexts, target_dir, drafter_dir, own_prompts, baseline, tmp_path, form
):
    change, arguments, environment = FORMS[form]
    draft = changed(drafter_dir, tmp_path / "draft", change)
    arguments = (*FP32, "--enable-metrics", *arguments, *hyperdflash_arguments(draft))
    server = servers.get(f"width {form}", target_dir, *arguments, environment=environment)
    for names in (UNPROCESSED, ["mixed"]):
        assert_cases(server, names, own_prompts, baseline)
        found = greedy_all(server, own_prompts, 8)
        assert ids(found) == baseline["own"]
    if form.startswith("width"):
        histograms = [a["meta_info"].get("spec_correct_drafts_histogram", []) for a in found]
        assert max(map(len, histograms)) == int(form[-1])
    if form.startswith("width") or change == "nan":
        test_sampling.assert_the_distribution_holds(contexts, server, 1)
    if form == "default":
        assert sorted(by_label(server, WIDTH_ROUNDS, "width")) == ["1", "7"]
    servers.stop(f"width {form}")
