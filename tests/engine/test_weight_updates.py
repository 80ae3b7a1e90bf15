"""New weights while a server runs: of the target, or of the drafter; answers stay right."""

import base64
import shutil
from collections.abc import Iterator

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer

from eval.algorithm import decode
from sglang_hyperdflash.serving.settings import COPY
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE
from tests.engine.asking import post
from tests.engine.conftest import FP32, flush, greedy, greedy_all, ids
from tests.engine.drafters import with_idle_head
from tests.engine.reference_decoder import block_draft

COMPARED = 36


def update(server, target) -> requests.Response:
    payload = {"model_path": str(target), "recapture_cuda_graph": True}
    return post(server, "/update_weights_from_disk", payload)


def send(server, tensors: dict[str, torch.Tensor], **selected) -> list[requests.Response]:
    """A session with some tensors, as a trainer on the same host sends them."""
    # By a file's name: handing descriptors over takes a key that parent and child share.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        data = base64.b64encode(MultiprocessingSerializer.serialize(list(tensors.items()))).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    body = {"serialized_named_tensors": [data], "flush_cache": False, **selected}
    steps = {"begin_weight_update": selected, "update_weights_from_tensor": body}
    steps["end_weight_update"] = {}
    return [post(server, f"/{name}", body) for name, body in steps.items()]


@pytest.fixture(scope="module")
def updated(servers, target_dir, drafter_dir) -> Iterator[Server]:
    """A server that takes weights; its drafts are the drafter's alone."""
    arguments = (*FP32, *hyperdflash_arguments(drafter_dir))
    yield servers.get("updated", target_dir, *arguments, environment={COPY: "0"})
    servers.stop("updated")


@pytest.mark.parametrize("which", ["other", "first"])
def test_a_new_drafter_drafts_as_if_the_server_had_started_with_it(
    updated, target_dir, drafter_dir, own_prompts, tmp_path, which
):
    """Round by round what the plain decoder finds: what is derived from weights is rebuilt."""
    draft = drafter_dir
    if which == "other":
        draft = with_idle_head(EXAMPLE / "hyperdflash", tmp_path / "other", like=drafter_dir)
    tensors = load_file(draft / "model.safetensors")
    names = sorted(tensors)
    for part in (names[:9], names[9:]):  # as trainers send buckets
        replies = send(updated, {n: tensors[n] for n in part}, selector="draft")
        assert [reply.status_code for reply in replies] == [200] * 3, replies[1].text
    flush(updated)
    target = LocalTarget(target_dir)
    for prompt in own_prompts[:2]:
        answer = greedy(updated, prompt, COMPARED)
        tokens, expected = decode(target, block_draft(target, draft), prompt, COMPARED, None)
        found = counters(answer["meta_info"])[2]
        assert answer["output_ids"] == tokens
        assert found + [0] * (len(expected) - len(found)) == expected


def test_tensors_reach_the_target_unless_the_draft_is_named(
    updated, target_dir, own_prompts, own_reference
):
    """``selector`` is all where a client names none; wrong ones change nothing."""
    files = sorted(target_dir.glob("*.safetensors"))
    head = next(t["head.weight"] for t in map(load_file, files) if "head.weight" in t)
    for selected in ({}, {"selector": "target"}):
        replies = send(updated, {"head.weight": head}, **selected)
        assert [reply.status_code for reply in replies] == [200] * 3, replies[1].text
    norm = torch.ones(head.shape[1])
    for tensors, name in (
        ({"norm.weight": norm, "head.weight": head}, "head.weight"),
        ({"norm.weight": norm[1:]}, "norm.weight"),
        ({"norm.weight": norm / 0}, "norm.weight"),
    ):
        begun, refused, ended = send(updated, tensors, selector="draft")
        assert (begun.status_code, refused.status_code, ended.status_code) == (200, 400, 200)
        assert name in refused.json()["message"]
    assert update(updated, target_dir / "none").status_code == 400
    assert ids(greedy_all(updated, own_prompts[:2], 2)) == own_reference[:2]


def test_answers_follow_the_target_s_new_weights(
    updated, target_dir, own_prompts, own_reference, tmp_path
):
    """There and back again; a drafter that was given the target's weights ended the server."""
    moved = shutil.copytree(target_dir, tmp_path / "target")
    for path in moved.glob("*.safetensors"):
        tensors = load_file(path)
        if "head.weight" in tensors:  # every token two rows further down
            tensors["head.weight"] = tensors["head.weight"].roll(2, 0).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    reply, target = update(updated, moved), LocalTarget(moved)
    assert reply.status_code == 200, reply.text
    for prompt in own_prompts[:2]:
        expected, _ = decode(target, lambda tokens: [0] * 6, prompt, 12, None)
        assert greedy(updated, prompt, 12)["output_ids"] == expected
    assert update(updated, target_dir).status_code == 200
    answers = greedy_all(updated, own_prompts[:6], 6)
    assert ids(answers) == own_reference[:6]
    # The drafter is still the one that knows this target.
    histograms = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers]
    assert sum(sum(histogram[3:]) for histogram in histograms) > len(answers)
