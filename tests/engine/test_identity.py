"""Temperature 0: HYPERDFLASH gives the baseline's tokens, one by one, whatever the scheduling."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine import conftest
from tests.engine.asking import post
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, greedy_together, ids, reused

pair = pytest.mark.xdist_group("pair")


def accepted(answers: list[dict]) -> int:
    return sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)


@pair
def test_logits_and_residual_of_the_portable_target(target_server, target_dir, own_prompts):
    """Through paged attention; ``test_core.py`` compares the core with transformers' own class."""
    target = LocalTarget(target_dir)
    options = {"return_hidden_states": True, "return_logprob": True, "logprob_start_len": 0}
    for prompt in own_prompts[::4]:
        answer = greedy(target_server, prompt, 12, **options)
        tokens, meta = prompt + answer["output_ids"], answer["meta_info"]
        final, residual, _ = target.features(torch.tensor([tokens]))
        logprobs = target.lm_head(final)[0].log_softmax(-1)
        values = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        for at, (value, token, *_) in enumerate(values, len(tokens) - len(values)):
            assert abs(value - float(logprobs[at - 1, token])) < 1e-4
        rows = [torch.tensor(row).view(-1, residual.shape[-1]) for row in meta["hidden_states"]]
        rows = torch.cat(rows)
        expected = residual[0, len(tokens) - 1 - len(rows) : len(tokens) - 1]
        assert len(rows) > 11
        assert (rows - expected).abs().max() < 1e-4 * float(expected.abs().max())


@pair
@pytest.mark.parametrize(("concurrency", "count"), [(1, 2), (8, 12)])
def test_own_prompts(hyper_server, own_prompts, own_reference, concurrency, count):
    answers = greedy_all(hyper_server, own_prompts[:count], concurrency)
    assert ids(answers) == own_reference[:count]
    # Real speculation happened, and all lengths are the asked ones.
    assert accepted(answers) > len(answers)
    assert {len(a["output_ids"]) for a in answers} == {NEW_TOKENS}


@pytest.mark.slow
@pair
def test_benchmark_prompts(hyper_server, target_server, benchmark_prompts):
    prompts = benchmark_prompts[::6]
    answers = greedy_all(hyper_server, prompts, 8)
    assert ids(answers) == ids(greedy_all(target_server, prompts, 8))


@pair
def test_prefix_cache_hits(hyper_server, own_prompts, own_reference):
    """The same prompts again, drafted for as well, and prompts that extend a cached answer."""
    prompts, reference = own_prompts[:6], own_reference[:6]
    conftest.flush(hyper_server)
    cold, hit = (greedy_all(hyper_server, prompts, 6) for _ in range(2))
    assert ids(cold) == reference
    assert ids(hit) == reference
    assert all(b > a for (_, a), (_, b) in zip(reused(cold), reused(hit), strict=True))
    # A draft's own near-tie may flip with the prefill's shape; lost draft K/V would cost most.
    assert abs(accepted(cold) - accepted(hit)) <= 0.02 * accepted(cold)
    longer = [p + r[:24] for p, r in zip(prompts, reference, strict=True)]
    answers = greedy_all(hyper_server, longer, 6)
    assert all(kept >= len(p) for (_, kept), p in zip(reused(answers), prompts, strict=True))
    for answer, expected in zip(ids(answers), reference, strict=True):
        assert answer[: NEW_TOKENS - 24] == expected[24:]


@pair
def test_no_turn_finds_fewer_cached_tokens(target_server, hyper_server, own_prompts):
    """The baseline keeps all of a turn but its last token, unless that was a draft: it is run."""
    tokens, both = 9, []
    for server in (target_server, hyper_server):
        conftest.flush(server)
        both.append(conftest.conversation(server, own_prompts[:6], tokens))
    plain, drafted = both
    assert ids(drafted) == ids(plain)
    asked = [prompt for prompt, _ in reused(plain)]
    kept = [0, *(prompt + tokens - 1 for prompt in asked[:-1])]
    assert reused(plain) == list(zip(asked, kept, strict=True))
    more = [found - least for (_, found), least in zip(reused(drafted), kept, strict=True)]
    assert set(more) <= {0, 1} and more[0] == 0, more


@pair
@pytest.mark.parametrize("stop", [{}, {"stop": [" is", "e"]}, {"max_new_tokens": 9}], ids=str)
def test_a_second_turn_of_a_session(target_server, hyper_server, tokenizer, own_prompts, stop):
    """It follows the answer before it, not the block in which that answer ended."""
    later = tokenizer.encode(" Now the same once more, please.", add_special_tokens=False)
    sampling = {"max_new_tokens": 64, "ignore_eos": False, **stop}

    def turns(server, prompt: list[int]) -> list[dict]:
        session, answers = post(server, "/open_session", {"capacity_of_str_len": 4096}).json(), []
        for tokens in (prompt, later):
            said = {"rid": answers[-1]["meta_info"]["id"]} if answers else {}
            params = {"id": session, **said}
            answers.append(greedy(server, tokens, sampling=sampling, session_params=params))
        post(server, "/close_session", {"session_id": session}).raise_for_status()
        return answers

    lengths, prompts = set(), own_prompts[:3]
    with ThreadPoolExecutor(len(prompts)) as pool:
        both = [list(pool.map(partial(turns, s), prompts)) for s in (target_server, hyper_server)]
    for prompt, expected, found in zip(prompts, *both, strict=True):
        assert ids(found) == ids(expected)
        contexts = [[a["meta_info"]["prompt_tokens"] for a in two] for two in (expected, found)]
        length = len(expected[0]["output_ids"])
        assert contexts[0] == contexts[1] and contexts[0][1] == len(prompt) + length + len(later)
        lengths.add(length)
    assert max(lengths) > 1  # an answer of several tokens can end inside a block


@pytest.mark.slow
def test_pages_of_16_without_overlap(servers, target_dir, drafter_dir, own_prompts, own_reference):
    """Launched as by ``sglang serve``, in a process that is started warm; prompts in chunks."""
    script = "import sys; from sglang.cli.main import main; sys.exit(main())"
    arguments = ("--chunked-prefill-size", "64", "--page-size", "16", "--disable-overlap-schedule")
    arguments = (*FP32, *arguments, *hyperdflash_arguments(drafter_dir))
    launcher = (sys.executable, "-c", script, "serve")
    server = servers.get("synchronous", target_dir, *arguments, launcher=launcher)
    longer = [p + r[:24] for p, r in zip(own_prompts, own_reference, strict=True)]
    answers = ids(greedy_together(server, [*own_prompts, *longer]))
    servers.stop("synchronous")
    assert answers[:12] == own_reference
    assert [a[: NEW_TOKENS - 24] for a in answers[12:]] == [r[24:] for r in own_reference]


@pytest.mark.slow
def test_bf16_differs_only_at_ties(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    """bf16 rounds otherwise than fp32: every first difference is a near-tie. Some are retracted."""
    environment = conftest.install_plugin(tmp_path, "optimistic", conftest.OPTIMISTIC)
    arguments = ("--dtype", "bfloat16", *conftest.COMMON, *conftest.SMALL_POOL)
    arguments += hyperdflash_arguments(drafter_dir)
    server = servers.get("bf16", target_dir, *arguments, environment=environment)
    answers = greedy_together(server, own_prompts)
    servers.stop("bf16")
    gaps = conftest.first_difference_gaps(target_dir, own_prompts, own_reference, ids(answers))
    print(f"bf16: {len(gaps)} of {len(own_prompts)} prompts differ; fp32 logit gaps {gaps}")
    assert all(gap < conftest.BF16_TIE for gap in gaps), gaps
    assert accepted(answers) > len(answers) and conftest.retractions(server)


@pytest.mark.slow
def test_the_script_itself(servers, target_dir, drafter_dir, own_prompts, own_reference):
    """It takes every process through its own imports, and a plain baseline is the baseline."""
    script = (str(Path(sys.executable).parent / "sglang"), "serve")
    for name, arguments in (("plain", ()), ("script", hyperdflash_arguments(drafter_dir))):
        server = servers.get(name, target_dir, *FP32, *arguments, launcher=script)
        assert ids(greedy_all(server, own_prompts, 8)) == own_reference
        servers.stop(name)
