"""Drafters with a dependency head: parity with training, ranks, an overfit block.

``test_window.py`` serves one with a window in every run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.draft.algorithm import propose_block
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine import probes
from tests.engine.asking import FEW, UNPROCESSED, assert_cases
from tests.engine.conftest import FP32, NEW_TOKENS, greedy_all, ids, install_plugin
from tests.engine.drafters import with_dependency, with_window
from tests.engine.reference_decoder import block_draft, decode
from tests.engine.test_sampling import contexts, p_values  # noqa: F401
from tests.engine.test_train_and_serve import compare_drafts, overfit

pytestmark = pytest.mark.slow
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


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_is_served_as_it_was_trained(
    servers,
    contexts,  # noqa: F811
    target_dir,
    drafter_dir,
    own_prompts,
    baseline,
    tmp_path,
    causal,
):
    """Drafts, every setting, and the distribution of what is drawn."""
    folder, log = with_head(drafter_dir, tmp_path / "head", causal=causal), tmp_path / "blocks"
    environment = install_plugin(tmp_path, "probes", probes.PLUGIN) | {probes.BLOCKS: str(log)}
    arguments = (*FP32, *hyperdflash_arguments(folder))
    server = servers.get("dependency", target_dir, *arguments, environment=environment)
    texts = compare_drafts(server, log, target_dir, folder, own_prompts[:4], 64)
    target, drafter = LocalTarget(target_dir), Drafter.load(folder).eval()
    bare = Drafter.load(drafter_dir).eval()
    both = [
        [propose_block(target, each, tokens[: len(prompt) + 9]) for each in (drafter, bare)]
        for prompt, tokens in zip(own_prompts, texts, strict=False)
    ]
    assert any(a != b for a, b in both), "a head that changes nothing says nothing"
    assert ids(greedy_all(server, own_prompts, 8)) == baseline["own"]
    assert_cases(server, UNPROCESSED, own_prompts, baseline)
    settings = [{}, {"top_k": 5}, {"top_p": 0.8}]
    tests = [v for i in range(9) for v in p_values(contexts, server, i, settings[i % 3], 1000)]
    print(f"{len(tests)} chi-square tests, smallest p {min(tests):.2e}")
    assert min(tests) > 0.001 / len(tests), tests
    servers.stop("dependency")


def test_two_ranks_and_a_window_draft_as_one_does(
    servers, target_dir, drafter_dir, own_prompts, baseline, tmp_path
):
    """Half of the LM head on each rank, the whole tables on both; a window of 48 tokens."""
    draft = with_window(with_head(drafter_dir, tmp_path / "head"), tmp_path / "windowed", 48)
    arguments = (*FP32, "--tp-size", "2", *hyperdflash_arguments(draft))
    ranks, target = servers.get("dependency-tp2", target_dir, *arguments), LocalTarget(target_dir)
    found = greedy_all(ranks, own_prompts[:4], 1)
    assert ids(found) == baseline["own"][:4]
    accepted = expected = 0
    for prompt, answer in zip(own_prompts, found, strict=False):
        _, histogram = decode(target, block_draft(target, draft), prompt, NEW_TOKENS, None)
        expected += sum(i * n for i, n in enumerate(histogram))
        accepted += counters(answer["meta_info"])[0]
    # Sums over two ranks round differently: a draft's own near-tie may flip, no more.
    assert accepted == pytest.approx(expected, rel=0.05) and accepted > len(found)
    assert_cases(ranks, FEW, own_prompts, baseline)
    servers.stop("dependency-tp2")


def test_one_sample_overfits_and_every_full_block_is_accepted(
    servers, target_dir, own_prompts, own_reference, tmp_path
):
    """Init with a head, train acceptance on one answer, serve."""
    options = "--causal --dependency-rank 16 --dependency-top-k 32"
    overfit(servers, target_dir, own_prompts[0], own_reference[0][:64], tmp_path, options)
