"""A drafter with a window and a dependency head: training's drafts, the baseline's tokens.

The head is random and strong: it changes most blocks, and some of its drafts are accepted. The pool
is as large as the windows of five requests, so that eight lose context.
"""

from __future__ import annotations

import pytest

from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine.asking import FEW, assert_cases
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, greedy_together, ids
from tests.engine.drafters import assert_lengths_vary, with_window
from tests.engine.reference_decoder import block_draft, decode
from tests.engine.test_dependency import with_head
from tests.pool_log import logged_pools

pytestmark = pytest.mark.xdist_group("window")
# Blocks of 8 requests and about five windows of 32 tokens: most contexts lose tokens.
TIGHT, WINDOW = "0.0068", 32
# Every token of the test keeps its slot: a ring that goes round loses the first prompts' K/V.
ROOMY = "0.25"
TOKENS, REQUESTS, BLOCK = 32768, 8, 7
# New tokens that the plain decoder finds too: past the window, so that it slides.
COMPARED = 64


def start(servers, name: str, target_dir, draft, ratio: str) -> Server:
    arguments = (*FP32, "--max-running-requests", str(REQUESTS), *hyperdflash_arguments(draft))
    return servers.get(name, target_dir, *arguments, environment={POOL_RATIO: ratio})


def draft_slots(server: Server) -> int:
    """Slots of the drafter's pool as its worker allocated them."""
    pools = logged_pools(server.log.read_text(errors="replace"))
    return next(pool.slots for pool in pools if pool.layers == 3)


def rounds(found: list[dict]) -> list[list[int]]:
    return [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in found]


@pytest.fixture(scope="module")
def draft(drafter_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("window")
    return with_window(with_head(drafter_dir, folder / "head"), folder / "narrow", WINDOW)


@pytest.fixture(scope="module")
def server(servers, target_dir, draft):
    yield start(servers, "window", target_dir, draft, TIGHT)
    servers.stop("window")


def test_rounds_are_the_plain_decoders(server, target_dir, draft, drafter_dir, own_prompts):
    """A window that slides, and a head that changes what is drafted."""
    target, found, without = LocalTarget(target_dir), [], []
    bare = with_window(drafter_dir, draft.parent / "bare", WINDOW)
    for prompt in own_prompts[:3]:
        answer = greedy(server, prompt, COMPARED)
        tokens, expected = decode(target, block_draft(target, draft), prompt, COMPARED, None)
        found.append(counters(answer["meta_info"])[2])
        assert answer["output_ids"] == tokens
        assert found[-1] == expected + [0] * (len(found[-1]) - len(expected))
        without.append(decode(target, block_draft(target, bare), prompt, COMPARED, None)[1])
    assert_lengths_vary(found)
    assert sum(map(sum, found)) > sum(map(sum, without)), "the head changes nothing"


@pytest.mark.slow
def test_a_pool_that_loses_tokens_costs_acceptance_only(server, own_prompts, own_reference):
    # Two at a time have the five windows to themselves.
    alone, shared = greedy_all(server, own_prompts, 2), greedy_together(server, own_prompts)
    assert ids(alone) == ids(shared) == own_reference
    # Eight requests share five windows: some rounds had lost context.
    assert sum(map(sum, rounds(shared))) > sum(map(sum, rounds(alone)))
    long = [token for prompt in own_prompts for token in prompt] * 2
    assert len(long) > 500
    assert len(greedy(server, long)["output_ids"]) == NEW_TOKENS
    assert draft_slots(server) == int(TOKENS * float(TIGHT)) + 1


def test_answers_are_the_baselines(server, own_prompts, baseline):
    """Every drafter gives the same tokens, whatever it drafts."""
    assert_cases(server, FEW, own_prompts, baseline)


@pytest.mark.slow
def test_a_window_over_every_context_drafts_as_without(
    servers, hyper_server, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    wide = with_window(drafter_dir, tmp_path / "wide", 512)
    server = start(servers, "window-512", target_dir, wide, ROOMY)
    # A prefix hit finds the draft K/V that the first request wrote.
    cold, hit = (greedy_all(server, own_prompts, REQUESTS) for _ in range(2))
    assert ids(cold) == ids(hit) == own_reference
    plain = greedy_all(hyper_server, own_prompts, REQUESTS)
    without, *found = (
        sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in each)
        for each in (plain, cold, hit)
    )
    # Near-ties of drafts turn with the shape of a prefill; lost draft K/V would cost most.
    assert all(abs(accepted - without) <= 0.02 * without for accepted in found)
    assert draft_slots(server) == int(TOKENS * float(ROOMY)) + 1
    servers.stop("window-512")


@pytest.mark.slow
def test_a_pool_too_small_for_one_window_is_refused(servers, target_dir, drafter_dir, tmp_path):
    wide = with_window(drafter_dir, tmp_path / "none", 512)
    with pytest.raises(ServerFailed, match="166"):
        start(servers, "window-none", target_dir, wide, TIGHT)
    servers.stop("window-none")
