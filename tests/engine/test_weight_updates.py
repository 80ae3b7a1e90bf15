"""New weights while a server runs: the target takes them, the drafter stays, answers are right."""

from __future__ import annotations

import base64
import shutil

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer

from sglang_hyperdflash.serving.scheduler.weight_updates import DRAFTER_STAYS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import FP32, greedy_all, ids
from tests.engine.test_width import RANDOM


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
    return requests.post(f"{server.url}/update_weights_from_disk", json=payload, timeout=300)


def send(server, name: str, tensor: torch.Tensor, **selected) -> list[requests.Response]:
    """A session with one tensor, as a trainer on the same host sends it."""
    # By a file's name: handing descriptors over takes a key that parent and child share.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        data = base64.b64encode(MultiprocessingSerializer.serialize([(name, tensor)])).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    steps = [
        ("begin_weight_update", selected),
        ("update_weights_from_tensor", {"serialized_named_tensors": [data], **selected}),
        ("end_weight_update", {}),
    ]
    return [requests.post(f"{server.url}/{at}", json=body, timeout=300) for at, body in steps]


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


def test_tensors_of_a_trainer_reach_the_target_unless_it_names_the_draft(pair, target_dir):
    """``selector`` is all where a client names none."""
    files = sorted(target_dir.glob("*.safetensors"))
    head = next(t["head.weight"] for t in map(load_file, files) if "head.weight" in t)
    for selected in ({}, {"selector": "target"}):
        replies = send(pair[1], "head.weight", head, **selected)
        assert [reply.status_code for reply in replies] == [200] * 3, replies[1].text
    begun, refused, ended = send(pair[1], "hidden_norm.weight", head[0], selector="draft")
    assert (begun.status_code, refused.status_code, ended.status_code) == (200, 400, 200)
    assert DRAFTER_STAYS in refused.json()["message"]
    assert requests.get(f"{pair[1].url}/health_generate", timeout=60).status_code == 200
