"""Several tokenizer workers, a drafter in its target's folder, and acceptance that is made up."""

import shutil

import requests

from sglang_hyperdflash.serving.startup.checks import BUNDLED
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import FP32, greedy, greedy_all, ids


def test_several_tokenizer_workers_and_a_bundled_drafter(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    """Workers load the plugins: they know the algorithm, and refuse what would end the server."""
    target = shutil.copytree(target_dir, tmp_path / "target")
    shutil.copytree(drafter_dir, target / BUNDLED)
    algorithm = ("--speculative-algorithm", "HYPERDFLASH", "--tokenizer-worker-num", "2")
    server = servers.get("front", target, *FP32, *algorithm)
    answers = greedy_all(server, own_prompts * 4, 8)
    assert ids(answers) == own_reference * 4
    assert all(counters(answer["meta_info"])[0] < len(answer["output_ids"]) for answer in answers)
    for _ in range(8):  # whichever worker takes it
        wrong = requests.post(f"{server.url}/generate", json={"input_ids": [5, -1]}, timeout=60)
        assert wrong.status_code == 400
    assert ids(greedy_all(server, own_prompts, 4)) == own_reference
    servers.stop("front")


def test_simulated_acceptance_at_every_width(servers, target_dir, drafter_dir, own_prompts):
    environment = {"SGLANG_SIMULATE_ACC_LEN": "2", "HYPERDFLASH_WIDTH": "random"}
    environment["HYPERDFLASH_WIDTHS"] = "2,4,7"
    arguments = (*FP32, *hyperdflash_arguments(drafter_dir))
    server = servers.get("simulated", target_dir, *arguments, environment=environment)
    for options in ({}, {"sampling": {"temperature": 1.0}}):
        answer = greedy(server, own_prompts[0], 41, **options)["meta_info"]
        assert answer["completion_tokens"] == 41
        assert answer["spec_verify_ct"] == 20  # the first token is the prefill's
    servers.stop("simulated")
