"""The rivals on the portable target: MTP through EAGLE, vanilla DFlash through DFLASH.

Each must answer as the baseline does, and its accept length must be what a plain torch decoder
finds: a comparison with a rival that is served wrongly would be worth nothing.
"""

from __future__ import annotations

import pytest

from eval.methods import resolve
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, greedy, greedy_all, ids
from tests.engine.drafters import assert_lengths_vary
from tests.engine.reference_decoder import block_draft, chain_draft, decode
from tests.engine.test_sampling import contexts, p_values  # noqa: F401

pytestmark = pytest.mark.slow
# Prompts and tokens of the plain decoder, which rereads its prefix for every draft of a chain.
COMPARED, COMPARED_TOKENS = 3, 36
NAMES = ("mtp3", "mtp6", "dflash6", "dflash2-style", "dspark-style", "hyperdflash6")
# The committed drafts.
FOLDERS = {
    "mtp": EXAMPLE / "mtp",
    "dflash": EXAMPLE / "dflash",
    "dspark_style": EXAMPLE / "dspark_style",
    "dflash2_style": EXAMPLE / "dflash2_style",
    "hyperdflash": EXAMPLE / "hyperdflash",
    "hyperdflash2": EXAMPLE / "drafter",
}


def folder_of(name: str):
    """The draft of a method of ``eval.methods``."""
    return FOLDERS[name.replace("-", "_").removesuffix("6").removesuffix("3")]


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


def server_of(servers, target_dir, name: str):
    drafts = {f"{kind}_draft": str(path) for kind, path in FOLDERS.items()}
    (_, method) = resolve(["baseline", name], drafts, {})
    environment = dict(method.environment)
    return servers.get(name, target_dir, *FP32, *method.arguments, environment=environment)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_and_tau(servers, target_dir, target, own_prompts, own_reference, name):
    """Histograms of single requests, entry by entry: so tau and every position's acceptance."""
    server = server_of(servers, target_dir, name)
    answers = greedy_all(server, own_prompts, 8)
    assert ids(answers) == own_reference
    alone = [greedy(server, prompt, COMPARED_TOKENS) for prompt in own_prompts[:COMPARED]]
    servers.stop(name)
    steps = int(name[3:]) if name.startswith("mtp") else 0
    folder, total = folder_of(name), 0
    draft = chain_draft(target, folder, steps) if steps else block_draft(target, folder)
    assert_lengths_vary([counters(answer["meta_info"])[2] for answer in alone])
    for prompt, answer in zip(own_prompts, alone, strict=False):
        expected, histogram = decode(target, draft, prompt, COMPARED_TOKENS, None)
        assert answer["output_ids"] == expected
        correct, rounds, found = counters(answer["meta_info"])
        assert found + [0] * (len(histogram) - len(found)) == histogram, name
        assert rounds == sum(histogram)
        assert correct == sum(i * n for i, n in enumerate(histogram))
        total += correct
    assert total > len(alone), "nothing was accepted: the comparison says little"


@pytest.mark.parametrize("name", ["mtp3", "dflash6"])
def test_draws_follow_the_target_distribution(servers, target_dir, contexts, name):  # noqa: F811
    server = server_of(servers, target_dir, name)
    # Top-k and top-p apart: SGLang applies them in turn here and at once in its plain sampler.
    settings = [{}, {"temperature": 0.8, "top_k": 20}, {"top_p": 0.9}]
    tests = [
        value for i in range(6) for value in p_values(contexts, server, i, settings[i % 3], 1000)
    ]
    servers.stop(name)
    print(f"{name}: {len(tests)} chi-square tests, smallest p {min(tests):.2e}")
    assert min(tests) > 0.001 / len(tests), tests
