"""The rivals on the portable target: MTP through EAGLE, vanilla DFlash through DFLASH.

Each must answer as the baseline does, and its accept length must be what a plain torch decoder
finds: a comparison with a rival that is served wrongly would be worth nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval.methods import resolve
from examples.tiny_deepseek_v4.train_mtp import new_layer, save, train
from sglang_hyperdflash.targets.files import TargetFacts, load_tokenizer
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache, Sample
from sglang_hyperdflash.training.trainer import Trainer
from tests.engine.conftest import FP32, greedy, greedy_all, ids
from tests.engine.drafters import assert_lengths_vary
from tests.engine.reference_decoder import block_draft, chain_draft, decode
from tests.engine.test_sampling import contexts, p_values  # noqa: F401

# Prompts and tokens of the plain decoder, which rereads its prefix for every draft of a chain.
COMPARED, COMPARED_TOKENS = 3, 36
SLOW = pytest.mark.slow
# Drafters with a head: shape, objective, and what their stage sets.
HEADS = {
    "dspark-style": (
        DrafterShape(2, reducer="fc", layer_ids=(5, 6, 7), dependency_rank=16),
        Objective(loss="acceptance"),
        {"dependency_gate": False},
    ),
    "dflash2-style": (
        DrafterShape(
            2,
            reducer="fc",
            layer_ids=(1, 3, 5),
            dependency_rank=16,
            dependency_top_k=16,
            dependency_form="product",
        ),
        Objective(loss="selector"),
        {},
    ),
    "hyperdflash2": (DrafterShape(2, dependency_rank=16, causal=True), Objective(), {}),
}


class Folders(dict[str, Path]):
    """Draft folders by kind; one with a head is trained when it is first asked for."""

    def __init__(self, trained: dict[str, Path], train: Callable[[str], Path]) -> None:
        super().__init__(trained)
        self.train = train

    def __missing__(self, name: str) -> Path:
        self[name] = self.train(name)
        return self[name]


def train_head(name: str, target: LocalTarget, mask: int, samples, out: Path) -> None:
    """A drafter of ``HEADS``, trained for seconds."""
    shape, objective, stage = HEADS[name]
    facts = TargetFacts.from_config(target.config.to_dict())
    torch.manual_seed(0)
    drafter = Drafter(draft_config(facts, target.hc_head, shape, mask))
    drafter.inherit(target.hc_head)
    recipe = Recipe(
        steps=80, batch=4, lr=3e-3, warmup_steps=10, every=80, objective=objective, **stage
    )
    cache = FeatureCache(target, samples, layer_ids=shape.layer_ids)
    Trainer(drafter, target, cache, {}, recipe, out.with_name(f"{name}-work")).run(out)


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory, target, target_dir, drafter_dir, own_prompts, own_reference
) -> Folders:
    """Drafts trained for seconds on the answers themselves: some of every length are accepted."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("rivals")
    samples = [
        Sample.continuation(prompt + answer, len(prompt))
        for prompt, answer in zip(own_prompts, own_reference, strict=True)
    ]
    cache = FeatureCache(target, samples, layer_ids=(1, 3, 5))
    core = new_layer(target, target_dir, out / "mtp")
    assert len(list(train(core, target, cache, steps=60, batch=4))) == 60
    save(core, out / "mtp")
    shape = DrafterShape(layers=2, reducer="fc", layer_ids=(1, 3, 5))
    facts = TargetFacts.from_config(target.config.to_dict())
    drafter = Drafter(
        draft_config(facts, target.hc_head, shape, load_tokenizer(str(target_dir)).mask_token_id)
    )
    recipe = Recipe(steps=80, batch=4, anchors=32, lr=3e-3, warmup_steps=10, every=80)
    Trainer(drafter, target, cache, {}, recipe, out / "work").run(out / "dflash")
    config = out / "dflash" / "config.json"
    named = json.loads(config.read_text()) | {"architectures": ["DFlashDraftModel"]}
    config.write_text(json.dumps(named))

    def trained_head(name: str) -> Path:
        train_head(name, target, load_tokenizer(str(target_dir)).mask_token_id, samples, out / name)
        return out / name

    trained = {"mtp": out / "mtp", "dflash": out / "dflash", "hyperdflash": drafter_dir}
    return Folders(trained, trained_head)


def server_of(servers, target_dir, folders, name: str):
    if name in HEADS:
        folders[name]
    drafts = {f"{kind.replace('-', '_')}_draft": str(path) for kind, path in folders.items()}
    (_, method) = resolve(["baseline", name], drafts, {})
    return servers.get(name, target_dir, *FP32, *method.arguments)


def drafts_of(target: LocalTarget, folders, name: str):
    if name.startswith("mtp"):
        return chain_draft(target, folders["mtp"], int(name[3:]))
    return block_draft(target, folders[name if name in HEADS else name.removesuffix("6")])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mtp3", marks=SLOW),
        "mtp6",
        "dflash6",
        pytest.param("dflash2-style", marks=SLOW),
        pytest.param("dspark-style", marks=SLOW),
        pytest.param("hyperdflash2", marks=SLOW),
    ],
)
def test_greedy_answers_and_tau(
    servers, target_dir, target, folders, own_prompts, own_reference, name
):
    server = server_of(servers, target_dir, folders, name)
    answers = greedy_all(server, own_prompts, 8)
    assert ids(answers) == own_reference
    alone = [greedy(server, prompt, COMPARED_TOKENS) for prompt in own_prompts[:COMPARED]]
    servers.stop(name)
    check_tau(target, folders, name, own_prompts, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp3", "dflash6"])
def test_draws_follow_the_target_distribution(servers, target_dir, folders, contexts, name):  # noqa: F811
    server = server_of(servers, target_dir, folders, name)
    # Top-k and top-p apart: SGLang applies them in turn here and at once in its plain sampler.
    settings = [{}, {"temperature": 0.8, "top_k": 20}, {"top_p": 0.9}]
    tests = [
        value for i in range(6) for value in p_values(contexts, server, i, settings[i % 3], 1000)
    ]
    servers.stop(name)
    print(f"{name}: {len(tests)} chi-square tests, smallest p {min(tests):.2e}")
    assert min(tests) > 0.001 / len(tests), tests


def test_hyperdflash_s_tau(hyper_server, target, folders, own_prompts):
    alone = [greedy(hyper_server, prompt, COMPARED_TOKENS) for prompt in own_prompts[:COMPARED]]
    check_tau(target, folders, "hyperdflash6", own_prompts, alone)


def check_tau(target, folders, name: str, prompts, answers) -> None:
    """Histograms of single requests, entry by entry: so tau and every position's acceptance."""
    draft, total = drafts_of(target, folders, name), 0
    assert_lengths_vary([counters(answer["meta_info"])[2] for answer in answers])
    for prompt, answer in zip(prompts, answers, strict=False):
        expected, histogram = decode(target, draft, prompt, COMPARED_TOKENS, None)
        assert answer["output_ids"] == expected
        correct, rounds, found = counters(answer["meta_info"])
        assert found + [0] * (len(histogram) - len(found)) == histogram, name
        assert rounds == sum(histogram)
        assert correct == sum(i * n for i, n in enumerate(histogram))
        total += correct
    assert total > len(answers), "nothing was accepted: the comparison says little"
