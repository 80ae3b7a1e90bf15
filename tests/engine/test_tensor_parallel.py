"""Two ranks over gloo: the tokens of one, and half the draft's K/V heads on each."""

from collections.abc import Iterator

import pytest

from eval.algorithm import decode
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine.asking import HOT, TOKENS
from tests.engine.conftest import FP32, greedy, greedy_all, ids
from tests.engine.drafters import assert_lengths_vary
from tests.engine.reference_decoder import block_draft
from tests.pool_log import logged_pools


@pytest.fixture(scope="module")
def server(servers, target_dir, drafter_dir) -> Iterator[Server]:
    """HYPERDFLASH on two ranks, fp32; stopped when this file is done."""
    arguments = (*FP32, "--tp-size", "2", *hyperdflash_arguments(drafter_dir))
    yield servers.get("hyper-tp2", target_dir, *arguments)
    servers.stop("hyper-tp2")


def test_tokens_are_the_baselines_and_drafts_the_decoders(
    server, target_dir, drafter_dir, own_prompts, own_reference
):
    assert ids(greedy_all(server, own_prompts, 6)) == own_reference
    target, accepted, expected, histograms = LocalTarget(target_dir), 0, 0, []
    for prompt in own_prompts[:2]:
        answer = greedy(server, prompt, TOKENS)
        _, histogram = decode(target, block_draft(target, drafter_dir), prompt, TOKENS, None)
        expected += sum(i * n for i, n in enumerate(histogram))
        accepted += counters(answer["meta_info"])[0]
        histograms.append(counters(answer["meta_info"])[2])
    assert_lengths_vary(histograms)
    # Sums over two ranks round differently: a draft's own near-tie may flip, no more.
    assert accepted == pytest.approx(expected, rel=0.1) and accepted > len(histograms)


@pytest.mark.slow
def test_draft_kv_heads_are_split_and_every_rank_has_its_pool(server):
    pools = logged_pools(server.log.read_text(errors="replace"))
    draft = sorted(pool[:4] for pool in pools if pool.layers == 3)
    assert draft == [(rank, 3, 1, 64) for rank in range(2)], pools


@pytest.mark.slow
def test_sampled_requests_finish_on_both_ranks(server, own_prompts, own_reference):
    """Ranks that drew different tokens would run out of step and hang, or answer wrongly after."""
    sampled = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True}
    found = server.generate(input_ids=own_prompts[:4], sampling_params=sampled)
    assert {len(tokens) for tokens in ids(found)} == {TOKENS}
    assert ids(greedy_all(server, own_prompts[:4], 4)) == own_reference[:4]
