"""The rivals on the portable target: MTP through EAGLE, vanilla DFlash through DFLASH.

Each must answer as target-only does, and its accept length must be what a plain torch decoder
finds: a comparison with a rival that is served wrongly would be worth nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.methods import resolve
from sglang_hyperdflash.metrics import counters
from sglang_hyperdflash.training.target import LocalTarget
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, ids
from tests.engine.reference_decoder import block_draft, chain_draft, decode
from tests.engine.test_sampling import contexts, p_values  # noqa: F401

FOLDERS = {"hyperdflash6": "drafter", "dflash6": "dflash", "mtp3": "mtp", "mtp6": "mtp"}
COMPARED = 4


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


def server_of(servers, target_dir, name: str):
    drafts = {f"{kind}_draft": str(EXAMPLE / kind) for kind in ("mtp", "dflash")}
    drafts["hyperdflash_draft"] = str(EXAMPLE / "drafter")
    (_, method) = resolve(["target", name], drafts, {})
    return servers.get(name, target_dir, *FP32, *method.arguments)


def drafts_of(target: LocalTarget, name: str):
    folder: Path = EXAMPLE / FOLDERS[name]
    if name.startswith("mtp"):
        return chain_draft(target, folder, int(name[3:]))
    return block_draft(target, folder)


@pytest.mark.parametrize("name", ["mtp3", "mtp6", "dflash6"])
def test_greedy_answers_and_tau(servers, target_dir, target, own_prompts, own_reference, name):
    server = server_of(servers, target_dir, name)
    answers = greedy_all(server, own_prompts, 4)
    assert ids(answers) == own_reference
    alone = [greedy(server, prompt) for prompt in own_prompts[:COMPARED]]
    servers.stop(name)
    check_tau(target, name, own_prompts, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp3", "dflash6"])
def test_sampled_draws_follow_the_target_s_law(servers, target_dir, contexts, name):  # noqa: F811
    server = server_of(servers, target_dir, name)
    settings = [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}]
    tests = [
        value for i in range(6) for value in p_values(contexts, server, i, settings[i % 2], 1000)
    ]
    servers.stop(name)
    print(f"{name}: {len(tests)} chi-square tests, smallest p {min(tests):.2e}")
    assert min(tests) > 0.001 / len(tests), tests


def test_hyperdflash_s_tau(hyper_server, target, own_prompts):
    alone = [greedy(hyper_server, prompt) for prompt in own_prompts[:COMPARED]]
    check_tau(target, "hyperdflash6", own_prompts, alone)


def check_tau(target, name: str, prompts, answers) -> None:
    """Histograms of single requests, entry by entry: so tau and every position's acceptance."""
    draft = drafts_of(target, name)
    for prompt, answer in zip(prompts, answers, strict=False):
        expected, histogram = decode(target, draft, prompt, NEW_TOKENS, None)
        assert answer["output_ids"] == expected
        correct, rounds, found = counters(answer["meta_info"])
        assert found + [0] * (len(histogram) - len(found)) == histogram, name
        assert rounds == sum(histogram)
        assert correct == sum(i * n for i, n in enumerate(histogram))
