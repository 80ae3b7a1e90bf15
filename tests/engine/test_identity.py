"""Temperature 0: HYPERDFLASH gives the baseline's tokens, one by one, whatever the scheduling."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import (
    BF16_TIE,
    COMMON,
    FP32,
    NEW_TOKENS,
    OPTIMISTIC,
    SMALL_POOL,
    conversation,
    first_difference_gaps,
    flush,
    greedy,
    greedy_all,
    greedy_together,
    ids,
    install_plugin,
    retractions,
    reused,
)

# What the script ``sglang`` does, in a process that is started warm.
SERVE = "import sys; from sglang.cli.main import main; sys.exit(main())"
SGLANG_SERVE = (sys.executable, "-c", SERVE, "serve")
VARIANTS = {
    "chunked-prefill-64, pages of 16, overlap off": (
        "--chunked-prefill-size",
        "64",
        "--page-size",
        "16",
        "--disable-overlap-schedule",
    ),
    # Eight requests do not fit, and OPTIMISTIC hides it at admission: some must be retracted.
    "small-pool, overlap on": SMALL_POOL,
}


def assert_identical(found: list[list[int]], expected: list[list[int]]) -> None:
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert not different, f"prompts {different} differ from the baseline"


@pytest.mark.parametrize(
    ("concurrency", "count"),
    [
        (1, 6),
        pytest.param(1, 12, marks=pytest.mark.slow),
        pytest.param(4, 12, marks=pytest.mark.slow),
        (8, 12),
    ],
)
def test_own_prompts(hyper_server, own_prompts, own_reference, concurrency, count):
    answers = greedy_all(hyper_server, own_prompts[:count], concurrency)
    assert_identical(ids(answers), own_reference[:count])


def test_a_third_of_the_benchmark_prompts(hyper_server, target_server, benchmark_prompts):
    prompts = benchmark_prompts[::3]
    answers = greedy_all(hyper_server, prompts, 8)
    assert_identical(ids(answers), ids(greedy_all(target_server, prompts, 8)))
    assert_speculated(answers)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_benchmark_prompts(hyper_server, benchmark_prompts, benchmark_reference, concurrency):
    answers = greedy_all(hyper_server, benchmark_prompts, concurrency)
    assert_identical(ids(answers), benchmark_reference)
    assert_speculated(answers)


def assert_speculated(answers: list[dict]) -> None:
    # Real speculation happened: drafts were accepted and all lengths are the asked ones.
    assert sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers) > len(answers)
    assert {len(a["output_ids"]) for a in answers} == {NEW_TOKENS}


def test_prefix_cache_hits(hyper_server, own_prompts, own_reference):
    """The same prompts again, and prompts that extend a cached answer.

    Draft K/V read back through the radix cache draft as well as fresh ones.
    """
    flush(hyper_server)
    cold = greedy_all(hyper_server, own_prompts, 4)
    hit = greedy_all(hyper_server, own_prompts, 4)
    assert_identical(ids(cold), own_reference)
    assert_identical(ids(hit), own_reference)
    assert all(
        a["meta_info"]["cached_tokens"] > b["meta_info"]["cached_tokens"]
        for a, b in zip(hit, cold, strict=True)
    )
    accepted = [
        sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
        for answers in (cold, hit)
    ]
    # A draft's own near-tie may flip with the prefill's shape; lost draft K/V would cost most.
    assert abs(accepted[0] - accepted[1]) <= 0.02 * accepted[0], accepted
    longer = [p + r[:50] for p, r in zip(own_prompts, own_reference, strict=True)]
    answers = greedy_all(hyper_server, longer, 4)
    assert all(
        a["meta_info"]["cached_tokens"] >= len(p) for a, p in zip(answers, own_prompts, strict=True)
    )
    for answer, reference in zip(ids(answers), own_reference, strict=True):
        assert answer[: NEW_TOKENS - 50] == reference[50:]


@pytest.mark.parametrize("tokens", [9, pytest.param(48, marks=pytest.mark.slow)])
def test_no_turn_finds_fewer_cached_tokens(target_server, hyper_server, own_prompts, tokens):
    """The baseline keeps all of a turn but its last token, which it never ran through the target.

    A draft was, so an answer that ends with one is kept whole.
    """
    both = []
    for server in (target_server, hyper_server):
        flush(server)
        both.append(conversation(server, own_prompts[:6], tokens))
    plain, drafted = both
    assert ids(drafted) == ids(plain)
    asked = [prompt for prompt, _ in reused(plain)]
    kept = [0, *(prompt + tokens - 1 for prompt in asked[:-1])]
    assert reused(plain) == list(zip(asked, kept, strict=True))
    more = [found - least for (_, found), least in zip(reused(drafted), kept, strict=True)]
    assert set(more) <= {0, 1} and more[0] == 0, more


def test_bf16_differs_only_at_ties(servers, target_dir, drafter_dir, own_prompts, record_property):
    """bf16 rounds a 7-row and a 1-row pass differently; every first difference is a near-tie."""
    bf16 = ("--dtype", "bfloat16", "--max-total-tokens", "32768", *COMMON)
    plain = servers.get("target-bf16", target_dir, *bf16)
    expected = ids(greedy_all(plain, own_prompts, 8))
    servers.stop("target-bf16")
    drafted = servers.get("hyper-bf16", target_dir, *bf16, *hyperdflash_arguments(drafter_dir))
    found = ids(greedy_all(drafted, own_prompts, 8))
    servers.stop("hyper-bf16")
    gaps = first_difference_gaps(target_dir, own_prompts, expected, found)
    record_property("bf16_first_difference_gaps", gaps)
    print(f"bf16: {len(gaps)} of {len(own_prompts)} prompts differ; fp32 logit gaps {gaps}")
    assert all(gap < BF16_TIE for gap in gaps), gaps


@pytest.fixture(scope="module", params=VARIANTS)
def variant_server(request, servers, target_dir, drafter_dir, tmp_path_factory):
    label = request.param.replace(", ", "-").replace(" ", "-")
    arguments = (*FP32, *VARIANTS[request.param], *hyperdflash_arguments(drafter_dir))
    environment = install_plugin(tmp_path_factory.mktemp("plugin"), "optimistic", OPTIMISTIC)
    # The other way to launch a server: once is enough.
    launcher = {"launcher": SGLANG_SERVE} if "--disable-overlap-schedule" in arguments else {}
    yield servers.get(label, target_dir, *arguments, environment=environment, **launcher)
    servers.stop(label)


def test_scheduling_variants(variant_server, own_prompts, own_reference):
    longer = [p + r[:64] for p, r in zip(own_prompts, own_reference, strict=True)]
    answers = ids(greedy_together(variant_server, [*own_prompts, *longer]))
    assert_identical(answers[:12], own_reference)
    assert_identical([a[: NEW_TOKENS - 64] for a in answers[12:]], [r[64:] for r in own_reference])
    if SMALL_POOL[1] in variant_server.command:
        assert retractions(variant_server)


@pytest.mark.slow
def test_the_script_itself(servers, target_dir, drafter_dir, own_prompts, own_reference):
    """It takes every process through its own imports."""
    script = (str(Path(sys.executable).parent / "sglang"), "serve")
    arguments = (*FP32, *hyperdflash_arguments(drafter_dir))
    server = servers.get("script", target_dir, *arguments, launcher=script)
    assert_identical(ids(greedy_all(server, own_prompts, 8)), own_reference)
    servers.stop("script")


@pytest.mark.slow
def test_scheduling_variants_on_benchmarks(variant_server, benchmark_prompts, benchmark_reference):
    assert_identical(ids(greedy_all(variant_server, benchmark_prompts, 8)), benchmark_reference)


@pytest.mark.slow
def test_long_answers(hyper_server, target_server, benchmark_prompts):
    """Sixty prompts x 600 tokens: positions far past anything the pair was trained on."""
    prompts = [prompt[:1400] for prompt in benchmark_prompts]

    def ask(server, prompt):
        return greedy(server, prompt, 600)

    expected = ids(greedy_all(target_server, prompts, 8, ask))
    assert_identical(ids(greedy_all(hyper_server, prompts, 8, ask)), expected)
