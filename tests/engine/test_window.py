"""A drafter with a window and a random, strong dependency head: drafts and answers are right."""

import pytest

from eval.algorithm import decode
from sglang_hyperdflash.serving.settings import COPY, POOL_RATIO
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine.asking import FEW, assert_cases
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, greedy_together, ids
from tests.engine.drafters import assert_lengths_vary, with_head, with_window
from tests.engine.reference_decoder import block_draft

pytestmark = pytest.mark.slow
# A pool of the blocks of 8 requests and about five windows: most contexts of eight lose tokens.
TIGHT, WINDOW = "0.0068", 32
# New tokens that the plain decoder finds too: past the window, so that it slides.
COMPARED = 64


@pytest.fixture(scope="module")
def draft(drafter_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("window")
    return with_window(with_head(drafter_dir, folder / "head"), folder / "narrow", WINDOW)


@pytest.fixture(scope="module")
def server(servers, target_dir, draft):
    arguments = (*FP32, "--max-running-requests", "8", *hyperdflash_arguments(draft))
    yield servers.get("window", target_dir, *arguments, environment={POOL_RATIO: TIGHT, COPY: "0"})
    servers.stop("window")


def test_rounds_are_the_plain_decoders(server, target_dir, draft, drafter_dir, own_prompts):
    """A window that slides, draft K/V of a cached prompt, and a head that changes the drafts."""
    target, found, without = LocalTarget(target_dir), [], []
    bare = with_window(drafter_dir, draft.parent / "bare", WINDOW)
    for prompt in own_prompts[:3]:
        tokens, expected = decode(target, block_draft(target, draft), prompt, COMPARED, None)
        for cached in (False, True):
            answer = greedy(server, prompt, COMPARED)
            assert (answer["meta_info"]["cached_tokens"] >= len(prompt) - 1) == cached
            found.append(counters(answer["meta_info"])[2])
            assert answer["output_ids"] == tokens
            assert found[-1] == expected + [0] * (len(found[-1]) - len(expected))
        without.append(decode(target, block_draft(target, bare), prompt, COMPARED, None)[1])
    assert_lengths_vary(found)
    assert sum(map(sum, found[::2])) > sum(map(sum, without)), "the head changes nothing"


def test_a_pool_that_loses_tokens_costs_acceptance_only(server, own_prompts, own_reference):
    # Two at a time have the five windows to themselves.
    alone, shared = greedy_all(server, own_prompts, 2), greedy_together(server, own_prompts)
    assert ids(alone) == ids(shared) == own_reference
    # Eight requests share five windows: some rounds had lost context.
    rounds = [sum(a["meta_info"]["spec_verify_ct"] for a in each) for each in (shared, alone)]
    assert rounds[0] > rounds[1]
    long = [token for prompt in own_prompts for token in prompt] * 2
    assert len(long) > 500
    assert len(greedy(server, long)["output_ids"]) == NEW_TOKENS


def test_answers_are_the_baselines(server, own_prompts, baseline):
    """Every drafter gives the same tokens, whatever it drafts."""
    assert_cases(server, FEW, own_prompts, baseline)
