"""Two ranks over gloo: the tokens of one, and half the draft's K/V heads on each."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from sglang_hyperdflash.tools.acceptance import accept_length, counters
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import FP32, HOT, greedy, greedy_all, ids
from tests.engine.drafters import assert_lengths_vary
from tests.pool_log import logged_pools
from tests.waiting import PATIENCE

RANKS = 2
TOKENS = 64
CONCURRENCY = 4


@pytest.fixture(scope="module")
def parallel_server(servers, target_dir, drafter_dir) -> Iterator[Server]:
    """HYPERDFLASH on two ranks, fp32; stopped when this file is done."""
    arguments = (*FP32, "--tp-size", str(RANKS), *hyperdflash_arguments(drafter_dir))
    yield servers.get("hyper-tp2", target_dir, *arguments)
    servers.stop("hyper-tp2")


def ask(server: Server, prompt: list[int]) -> dict:
    return greedy(server, prompt, TOKENS)


def tau(answers: list[dict]) -> float:
    """Tokens per verification round of all answers, the bonus token included."""
    found = [counters(answer["meta_info"]) for answer in answers]
    return accept_length(sum(f[0] for f in found), sum(f[1] for f in found))


def test_tokens_are_the_baselines_and_drafts_are_as_good(
    parallel_server, hyper_server, own_prompts, own_reference
):
    answers = greedy_all(parallel_server, own_prompts, CONCURRENCY, ask)
    assert len(answers) >= 8
    assert ids(answers) == [tokens[:TOKENS] for tokens in own_reference]
    single = tau(greedy_all(hyper_server, own_prompts, CONCURRENCY, ask))
    found = tau(answers)
    assert found > 1.5
    assert_lengths_vary([counters(answer["meta_info"])[2] for answer in answers])
    # Sums over two ranks round differently: a draft's own near-tie may flip, no more.
    assert found == pytest.approx(single, rel=0.02)


def test_draft_kv_heads_are_split_and_every_rank_has_its_pool(parallel_server, drafter_dir):
    config = json.loads((drafter_dir / "config.json").read_text())
    log = parallel_server.log.read_text(errors="replace")
    pools = logged_pools(log)
    layers, heads, head_dim = (
        config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    draft = [pool[:4] for pool in pools if pool.layers == layers]
    assert heads >= RANKS
    expected = [(rank, layers, heads // RANKS, head_dim) for rank in range(RANKS)]
    assert sorted(draft) == expected, pools
    assert "fused_kv=True" in log


def test_sampled_requests_finish_on_both_ranks(parallel_server, own_prompts, own_reference):
    """Ranks that drew different tokens would run out of step and hang, or answer wrongly after."""
    sampled = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True}

    def sample(server, prompt):
        return server.generate(input_ids=prompt, sampling_params=sampled, timeout=PATIENCE)

    answers = greedy_all(parallel_server, own_prompts[:4], CONCURRENCY, sample)
    assert {len(tokens) for tokens in ids(answers)} == {TOKENS}
    after = greedy_all(parallel_server, own_prompts[:4], CONCURRENCY, ask)
    assert ids(after) == [tokens[:TOKENS] for tokens in own_reference[:4]]


def test_a_seed_gives_one_ranks_tokens_on_two(parallel_server, hyper_server, own_prompts):
    """Coupled verification, filters and penalties; neither server waits for the other's draws."""

    def sample(server, prompt):
        sampling = {
            "temperature": HOT,
            "top_p": 0.9,
            "frequency_penalty": 0.3,
            "sampling_seed": len(prompt),
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
        }
        return server.generate(input_ids=prompt, sampling_params=sampling, timeout=PATIENCE)

    found, expected = (
        ids(greedy_all(server, own_prompts[:6], CONCURRENCY, sample))
        for server in (parallel_server, hyper_server)
    )
    assert found == expected
    assert len(set(map(tuple, found))) == len(found)
