"""Windowed drafters: the pool is as large as the windows, and the tokens are the baseline's."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, greedy_together, ids
from tests.engine.drafters import assert_lengths_vary, with_window
from tests.engine.reference_decoder import block_draft, decode
from tests.pool_log import logged_pools

# Blocks of 8 requests and about five windows of 32 tokens: most contexts lose tokens.
TIGHT = {POOL_RATIO: "0.0068"}
# Every token of the test keeps its slot: a ring that goes round loses the first prompts' K/V.
ROOMY = {POOL_RATIO: "0.25"}
TOKENS, REQUESTS, BLOCK = 32768, 8, 7
# New tokens that the plain decoder finds too: past the window, so that it slides.
COMPARED = 64


def start(servers, name: str, target_dir: Path, draft: Path, **environment) -> Server:
    arguments = (*FP32, "--max-running-requests", str(REQUESTS), *hyperdflash_arguments(draft))
    return servers.get(name, target_dir, *arguments, environment=environment)


def draft_slots(server: Server, layers: int) -> int:
    """Slots of the drafter's pool as its worker allocated them."""
    pools = logged_pools(server.log.read_text(errors="replace"))
    return next(pool.slots for pool in pools if pool.layers == layers)


def padded(histogram: list[int]) -> list[int]:
    return histogram + [0] * (BLOCK - len(histogram))


def accepted(answers: list[dict]) -> int:
    return sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)


def rounds(answers: list[dict]) -> list[list[int]]:
    return [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]


def test_a_window_over_every_context_drafts_as_without(
    servers, hyper_server, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    draft = with_window(drafter_dir, tmp_path / "wide", 512)
    server = start(servers, "window-512", target_dir, draft, **ROOMY)
    try:
        cold = greedy_all(server, own_prompts, REQUESTS)
        # A prefix hit finds the draft K/V that the first request wrote.
        hit = greedy_all(server, own_prompts, REQUESTS)
        assert ids(cold) == ids(hit) == own_reference
        assert_lengths_vary(rounds(hit))
        without = accepted(greedy_all(hyper_server, own_prompts, REQUESTS))
        # Near-ties of drafts turn with the shape of a prefill; lost draft K/V would cost most.
        for answers in (cold, hit):
            assert abs(accepted(answers) - without) <= 0.02 * without
        assert draft_slots(server, 3) == int(TOKENS * float(ROOMY[POOL_RATIO])) + 1
    finally:
        servers.stop("window-512")


def test_a_pool_that_loses_tokens_costs_acceptance_only(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    draft = with_window(drafter_dir, tmp_path / "narrow", 32)
    server = start(servers, "window-32", target_dir, draft, **TIGHT)
    try:
        target = LocalTarget(target_dir)
        for prompt in own_prompts[:3]:
            answer = greedy(server, prompt, COMPARED)
            _, expected = decode(target, block_draft(target, draft), prompt, COMPARED, None)
            assert padded(answer["meta_info"]["spec_correct_drafts_histogram"]) == expected
        # Two at a time have the five windows to themselves.
        alone = greedy_all(server, own_prompts, 2)
        assert_lengths_vary(rounds(alone))
        together = greedy_together(server, own_prompts)
        assert ids(alone) == ids(together) == own_reference
        # Eight requests share five windows: some rounds had lost context.
        assert sum(map(sum, rounds(together))) > sum(map(sum, rounds(alone)))
        long = [token for prompt in own_prompts for token in prompt] * 2
        assert len(long) > 500
        assert len(ids([greedy(server, long)])[0]) == NEW_TOKENS
        assert draft_slots(server, 3) == int(TOKENS * float(TIGHT[POOL_RATIO])) + 1
    finally:
        servers.stop("window-32")


def test_a_pool_too_small_for_one_window_is_refused(servers, target_dir, drafter_dir, tmp_path):
    draft = with_window(drafter_dir, tmp_path / "none", 512)
    with pytest.raises(ServerFailed, match="has 166 left for windows of 512 tokens"):
        start(servers, "window-none", target_dir, draft, **TIGHT)
    servers.stop("window-none")
