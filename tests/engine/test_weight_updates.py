"""New weights while a server runs: of the target, or of the drafter; answers stay right."""

from __future__ import annotations

import base64
import shutil

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, flush, greedy, greedy_all, ids, install_plugin
from tests.engine.drafters import with_idle_head
from tests.engine.test_width import RANDOM
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def other_target(target_dir, tmp_path_factory):
    """The tiny target with another head: every token two rows further down."""
    folder = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(target_dir, folder)
    changed = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "head.weight" in tensors:
            tensors["head.weight"] = tensors["head.weight"].roll(2, 0).contiguous()
            changed += 1
        save_file(tensors, path, metadata={"format": "pt"})
    assert changed == 1
    return folder


@pytest.fixture(scope="module")
def pair(servers, target_dir, drafter_dir):
    """One server without speculation and one with it, of changing widths."""
    names = "update-plain", "update-hyperdflash"
    yield (
        servers.get(names[0], target_dir, *FP32),
        servers.get(
            names[1], target_dir, *FP32, *hyperdflash_arguments(drafter_dir), environment=RANDOM
        ),
    )
    for name in names:
        servers.stop(name)


def update(server, target) -> requests.Response:
    payload = {"model_path": str(target), "recapture_cuda_graph": True}
    return requests.post(f"{server.url}/update_weights_from_disk", json=payload, timeout=PATIENCE)


def send(server, tensors: dict[str, torch.Tensor], **selected) -> list[requests.Response]:
    """A session with some tensors, as a trainer on the same host sends them."""
    # By a file's name: handing descriptors over takes a key that parent and child share.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        data = base64.b64encode(MultiprocessingSerializer.serialize(list(tensors.items()))).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    steps = [
        ("begin_weight_update", selected),
        (
            "update_weights_from_tensor",
            {"serialized_named_tensors": [data], "flush_cache": False, **selected},
        ),
        ("end_weight_update", {}),
    ]
    return [requests.post(f"{server.url}/{at}", json=body, timeout=PATIENCE) for at, body in steps]


def test_answers_follow_the_target_s_new_weights(pair, target_dir, other_target, own_prompts):
    """There and back again; a drafter that was given the target's weights ended the server."""
    prompts = own_prompts[:6]
    first = [ids(greedy_all(server, prompts, 3)) for server in pair]
    for folder in (other_target, target_dir):
        replies = [update(server, folder) for server in pair]
        assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
        answers = [greedy_all(server, prompts, 3) for server in pair]
        plain, ours = map(ids, answers)
        assert ours == plain
        assert (plain == first[0]) == (folder == target_dir)
    # The drafter is still the one that knows this target.
    histograms = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers[1]]
    assert sum(sum(histogram[3:]) for histogram in histograms) > len(prompts)


def test_a_folder_that_is_not_there_changes_nothing(pair, tmp_path, own_prompts):
    before = ids(greedy_all(pair[1], own_prompts[:2], 2))
    assert update(pair[1], tmp_path / "none").status_code == 400
    assert ids(greedy_all(pair[1], own_prompts[:2], 2)) == before


def test_tensors_of_a_trainer_reach_the_target_unless_it_names_the_draft(
    pair, target_dir, own_prompts
):
    """``selector`` is all where a client names none."""
    files = sorted(target_dir.glob("*.safetensors"))
    head = next(t["head.weight"] for t in map(load_file, files) if "head.weight" in t)
    for selected in ({}, {"selector": "target"}):
        replies = send(pair[1], {"head.weight": head}, **selected)
        assert [reply.status_code for reply in replies] == [200] * 3, replies[1].text
    before = ids(greedy_all(pair[1], own_prompts[:2], 2))
    norm = torch.ones(head.shape[1])
    for tensors, said in (
        ({"norm.weight": norm, "head.weight": head}, "unexpected tensor head.weight"),
        ({"norm.weight": norm[1:]}, "norm.weight has shape"),
        ({"norm.weight": norm / 0}, "norm.weight holds NaN or infinite values"),
    ):
        begun, refused, ended = send(pair[1], tensors, selector="draft")
        assert (begun.status_code, refused.status_code, ended.status_code) == (200, 400, 200)
        assert said in refused.json()["message"]
    assert ids(greedy_all(pair[1], own_prompts[:2], 2)) == before


# Without this, draft K/V of contexts would be those of the old weights.
NO_REBUILD = """
def load():
    from sglang_hyperdflash.serving.drafting import replace

    replace.rebuild = lambda worker: None
"""


def lengths(server, prompts) -> list[list[int]]:
    """Rounds of every answer by accepted drafts, without anything cached."""
    flush(server)
    answers = [greedy(server, prompt) for prompt in prompts]
    return [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]


@pytest.mark.parametrize("rebuilds", [True, False])
def test_a_new_drafter_drafts_as_if_the_server_had_started_with_it(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path, rebuilds
):
    """There and back, and round by round; the control lacks what is derived from weights."""
    other = with_idle_head(EXAMPLE / "hyperdflash", tmp_path / "other", like=drafter_dir)
    environment = {} if rebuilds else install_plugin(tmp_path, "no_rebuild", NO_REBUILD)
    started, updated = (
        servers.get(f"update-{name}", target_dir, *FP32, *hyperdflash_arguments(draft), **options)
        for name, draft, options in (
            ("started", other, {}),
            ("updated", drafter_dir, {"environment": environment}),
        )
    )
    try:
        prompts = own_prompts[:6]
        first, expected = lengths(updated, prompts), lengths(started, prompts)
        assert first != expected
        for folder, those in ((other, expected), (drafter_dir, first)):
            tensors = load_file(folder / "model.safetensors")
            names = sorted(tensors)
            # In two parts, as trainers send buckets.
            for part in (names[:9], names[9:]):
                replies = send(updated, {n: tensors[n] for n in part}, selector="draft")
                assert [reply.status_code for reply in replies] == [200] * 3, replies[1].text
            found = lengths(updated, prompts)
            assert ids(greedy_all(updated, prompts, 3)) == own_reference[:6]
            assert (found == those) == (rebuilds or folder == drafter_dir)
    finally:
        servers.stop("update-started")
        servers.stop("update-updated")
