"""A served drafter with a dependency head: training's drafts, the baseline's tokens.

The head is random and strong: it changes most blocks, and some of its drafts are accepted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.algorithm import propose_block
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample, collate
from sglang_hyperdflash.training.trainer import Trainer
from tests.engine.conftest import FP32, NEW_TOKENS, greedy, greedy_all, ids, install_plugin
from tests.engine.drafters import assert_varied, with_dependency, with_window
from tests.engine.reference_decoder import block_draft, decode
from tests.engine.test_exact import (  # noqa: F401
    PROMPTS,
    SETTINGS,
    deterministic,
    mixed,
    references,
    sampled,
    tokens_of,
)
from tests.engine.test_sampling import contexts, p_values  # noqa: F401
from tests.engine.test_train_and_serve import RECORDER, recorded

RANK = 8


def with_head(drafter_dir: Path, out: Path, *, causal: bool = False) -> Path:
    """A drafter with a dependency head of random weights."""
    old = Drafter.load(drafter_dir)
    rank = RANK if old.dependency is None else old.config.dependency.rank
    drafter = Drafter(with_dependency(old.raw, rank, causal=causal))
    drafter.load_state_dict(old.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, size in (
            (drafter.dependency.predecessor, 1.0),
            (drafter.dependency.successor, 0.4),
            (drafter.dependency.gate.weight, drafter.config.hidden_size**-0.5),
        ):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    out.mkdir(parents=True, exist_ok=True)
    drafter.save(out)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory, drafter_dir) -> Path:
    return with_head(drafter_dir, tmp_path_factory.mktemp("head") / "draft")


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(servers, target_dir, folder, records):
    yield servers.get(
        "dependency",
        target_dir,
        *FP32,
        *hyperdflash_arguments(folder),
        environment=install_plugin(records, "recorder", RECORDER)
        | {"RECORDED_BLOCKS": str(records / "blocks.jsonl")},
    )
    servers.stop("dependency")


def check_parity(server, target_dir, folder, records, prompts, length: int) -> None:
    """The served drafts are the trainer's, for every block, and those of ``draft.algorithm``."""
    (records / "blocks.jsonl").unlink(missing_ok=True)
    target = LocalTarget(target_dir)
    drafter = Drafter.load(folder).eval()
    replay, compared, without = Replay(drafter, target), [], []
    for prompt in prompts:
        tokens = prompt + greedy(server, prompt, length)["output_ids"]
        blocks = recorded(records, tokens, len(prompt))
        sample = Sample.continuation(tokens, len(prompt))
        states = FeatureCache(target, [sample], dtype=torch.float32).states([0])
        anchors, drafts = torch.tensor([[at for at, _ in blocks]]), [b for _, b in blocks]
        keep = torch.ones_like(anchors).bool()
        assert replay.draft(collate([sample]), states, anchors, keep)[0].tolist() == drafts
        at, block = blocks[len(blocks) // 2]
        assert propose_block(target, drafter, tokens[: at + 1]) == block
        with torch.no_grad():
            hidden = replay.draft_states(collate([sample]), states, anchors, keep)
        without += target.lm_head(hidden).argmax(-1)[0].tolist()
        compared += drafts
    assert len(compared) >= 60
    assert_varied(compared)
    changed = sum(a != b for a, b in zip(compared, without, strict=True))
    assert changed > len(compared) / 2, "a head that changes nothing says nothing"


def test_training_and_server_propose_the_same_tokens(
    server, target_dir, folder, records, own_prompts
):
    check_parity(server, target_dir, folder, records, own_prompts[:4], 64)


@pytest.mark.slow
def test_a_causal_block_is_served_as_it_was_trained(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    folder = with_head(drafter_dir, tmp_path / "draft", causal=True)
    causal = servers.get(
        "causal",
        target_dir,
        *FP32,
        *hyperdflash_arguments(folder),
        environment=install_plugin(tmp_path, "recorder", RECORDER)
        | {"RECORDED_BLOCKS": str(tmp_path / "blocks.jsonl")},
    )
    check_parity(causal, target_dir, folder, tmp_path, own_prompts[:4], 64)
    assert ids(greedy_all(causal, own_prompts, 4)) == own_reference
    servers.stop("causal")


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_greedy_answers_are_the_baselines(server, own_prompts, own_reference, concurrency):
    answers = greedy_all(server, own_prompts, concurrency)
    assert ids(answers) == own_reference
    assert sum(counters(answer["meta_info"])[0] for answer in answers) > len(answers)


def test_a_seed_gives_another_drafters_tokens_whatever_the_batchmates(
    server, hyper_server, own_prompts
):
    """Every drafter gives the same seeded tokens: so does one with a random head.

    That the other's are the baseline's, ``test_exact.py`` shows.
    """
    kinds = [mixed(i)[1] for i in range(PROMPTS)]
    plain = [sampled(i) for i in range(PROMPTS)]
    for parameters, batch in ((kinds, 8), (plain, 4)):
        expected = tokens_of(hyper_server, own_prompts[:PROMPTS], parameters, 6)
        assert tokens_of(server, own_prompts[:PROMPTS], parameters, batch) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_alone(server, own_prompts, references, name):  # noqa: F811
    parameters = [sampled(i, **SETTINGS[name]) for i in range(PROMPTS)]
    assert tokens_of(server, own_prompts[:PROMPTS], parameters, 4) == references[name]


@pytest.mark.slow
def test_two_ranks_and_a_window_draft_as_one_does(
    servers,
    target_dir,
    folder,
    own_prompts,
    own_reference,
    references,  # noqa: F811
    tmp_path,
):
    """Half of the LM head on each rank, the whole tables on both; a window of 48 tokens."""
    draft = with_window(folder, tmp_path / "windowed", 48)
    arguments = (*FP32, "--tp-size", "2", *hyperdflash_arguments(draft))
    ranks, target = servers.get("dependency-tp2", target_dir, *arguments), LocalTarget(target_dir)
    answers = greedy_all(ranks, own_prompts[:4], 1)
    assert ids(answers) == own_reference[:4]
    found = expected = 0
    for prompt, answer in zip(own_prompts, answers, strict=False):
        _, histogram = decode(target, block_draft(target, draft), prompt, NEW_TOKENS, None)
        expected += sum(i * n for i, n in enumerate(histogram))
        found += counters(answer["meta_info"])[0]
    # Sums over two ranks round differently: a draft's own near-tie may flip, no more.
    assert found == pytest.approx(expected, rel=0.05) and found > len(answers)
    parameters = [sampled(i) for i in range(PROMPTS)]
    assert tokens_of(ranks, own_prompts[:PROMPTS], parameters, 4) == references["unfiltered"]
    servers.stop("dependency-tp2")


def check_distribution(contexts, server, indices, count: int) -> None:  # noqa: F811
    settings = [{}, {"top_k": 5}, {"top_p": 0.8}]
    tests = [
        value
        for i in indices
        for value in p_values(contexts, server, i, settings[i % len(settings)], count)
    ]
    print(f"{len(tests)} chi-square tests, smallest p {min(tests):.2e}")
    assert min(tests) > 0.001 / len(tests), tests


@pytest.mark.slow
def test_sampled_draws_follow_the_targets_distribution(server, contexts):  # noqa: F811
    check_distribution(contexts, server, range(3), 600)


@pytest.mark.slow
def test_sampled_draws_follow_the_targets_distribution_at_twenty_contexts(server, contexts):  # noqa: F811
    check_distribution(contexts, server, range(20), 1000)


@pytest.mark.slow
def test_one_sample_overfits_and_every_full_block_is_accepted(
    servers, target_dir, own_prompts, own_reference, tmp_path
):
    """Init with a head, train acceptance on one answer, serve."""
    options = "--layers 2 --heads 2 --kv-heads 1 --head-dim 64 --intermediate-size 256 --causal"
    options += " --dependency-rank 16 --dependency-top-k 32"
    draft = tmp_path / "draft"
    assert main(["init", "--target", str(target_dir), "--out", str(draft), *options.split()]) == 0
    prompt, answer = own_prompts[0], own_reference[0][:64]
    target = LocalTarget(target_dir)
    cache = FeatureCache(target, [Sample.continuation(prompt + answer, len(prompt))])
    recipe = Recipe(steps=300, batch=1, anchors=64, lr=3e-3, warmup_steps=10, every=100)
    trainer = Trainer(
        Drafter.load(draft), target, cache, {"train": cache}, recipe, tmp_path / "work"
    )
    assert trainer.objective.loss == "acceptance"
    trainer.run(tmp_path / "trained")
    print(f"simulated on the sample itself: {trainer.records[-1]['held_out']['train']}")
    name, arguments = "overfit-head", hyperdflash_arguments(tmp_path / "trained")
    served = servers.get(name, target_dir, *FP32, *arguments)
    result = greedy(served, prompt, len(answer))
    servers.stop(name)
    assert result["output_ids"] == answer
    assert counters(result["meta_info"]) == (54, 9, [0, 0, 0, 0, 0, 0, 9])
