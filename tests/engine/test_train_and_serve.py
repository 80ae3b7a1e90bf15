"""What was trained is what is served: the same drafts, an overfit block, the target's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample, States, collate
from sglang_hyperdflash.training.trainer import Trainer
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, chat_ids, greedy, install_plugin
from tests.engine.drafters import assert_varied, rescale_folder
from tests.unit.hub_cache import hub_home

RECORDER = '''
"""Appends every verified block, ``[request, position of its anchor, anchor, draft, ...]``."""

import json
import os


def record(result, self, logits, argmaxes, block, requests):
    if block.width == 1:  # nothing is drafted
        return
    names = [req.rid for req in requests.reqs]
    blocks = zip(names, block.positions[:, 0].tolist(), block.tokens.tolist())
    with open(os.environ["RECORDED_BLOCKS"], "a") as out:
        out.writelines(json.dumps([name, at, *block]) + "\\n" for name, at, block in blocks)


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang_hyperdflash.serving.verification.verifier.Verifier.accept", record, HookType.AFTER
    )
'''

# A forked server has imported huggingface_hub before it sees its environment.
HUB = """
import os


def load():
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.path.join(os.environ["HF_HOME"], "hub")
    constants.HF_HUB_OFFLINE = True
"""


def recorded(folder: Path, tokens: list[int], start: int) -> list[tuple[int, list[int]]]:
    """The blocks of one finished request, with the position of each anchor in ``tokens``."""
    path = folder / "blocks.jsonl"
    blocks = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    found = []
    for _request, prefix, anchor, *drafts in blocks:
        if start <= prefix < len(tokens):
            assert anchor == tokens[prefix], "a block's anchor is not the token at its position"
            found.append((prefix, drafts))
    return found


def replayed(replay: Replay, sample: Sample, states: States, anchors: list[int]) -> list[list[int]]:
    """The drafts that training proposes at ``anchors`` of one text."""
    at = torch.tensor([anchors])
    return replay.draft(collate([sample]), states, at, torch.ones_like(at).bool())[0].tolist()


def compare_drafts(
    servers, target_dir, draft, prompts, length, tmp_path, share: float = 1 / 3
) -> list[list[int]]:
    """Serve ``prompts`` and assert that training proposes the six tokens the server proposed.

    The server is given the drafter's hub id.

    Returns:
        The served answers, fp32, greedy.
    """
    hub_home(tmp_path / "home", draft, "owner/drafter")
    server = servers.get(
        "recorder",
        target_dir,
        *FP32,
        *hyperdflash_arguments("owner/drafter"),
        environment=install_plugin(tmp_path, "recorder", RECORDER)
        | install_plugin(tmp_path, "hub", HUB)
        | {"RECORDED_BLOCKS": str(tmp_path / "blocks.jsonl"), "HF_HOME": str(tmp_path / "home")},
    )
    (tmp_path / "blocks.jsonl").unlink(missing_ok=True)  # the server's own warm-up
    target, compared, answers = LocalTarget(target_dir), [], []
    replay = Replay(Drafter.load(draft).eval(), target)
    for prompt in prompts:
        answers.append(greedy(server, prompt, length)["output_ids"])
        tokens = prompt + answers[-1]
        blocks = recorded(tmp_path, tokens, len(prompt))
        sample = Sample.continuation(tokens, len(prompt))
        source = FeatureCache(
            target,
            [sample],
            dtype=torch.float32,
            layer_ids=replay.drafter.config.captured_layers,
        )
        ours = replayed(replay, sample, source.states([0]), [at for at, _ in blocks])
        assert ours == [drafts for _, drafts in blocks]
        compared += ours
    servers.stop("recorder")
    assert len(compared) >= 200
    assert_varied(compared, share)
    return answers


def test_training_and_server_propose_the_same_tokens(
    servers, target_dir, drafter_dir, own_prompts, tmp_path
):
    """On 200 contexts and more, fp32: the same six tokens from the same context."""
    compare_drafts(servers, target_dir, drafter_dir, own_prompts[:8], 96, tmp_path)


@pytest.mark.slow
def test_a_drafter_of_layers_proposes_the_same_tokens_and_loses_nothing(
    servers, target_dir, own_prompts, own_reference, tmp_path
):
    """An untrained DFlash-style drafter: nearly every draft is rejected."""
    draft = tmp_path / "draft"
    options = "--layer-ids 1 3 --layers 1 --intermediate-size 128 --dependency-rank 0"
    assert main(["init", "--target", str(target_dir), "--out", str(draft), *options.split()]) == 0
    rescale_folder(draft)
    answers = compare_drafts(servers, target_dir, draft, own_prompts[:4], 64, tmp_path, share=0.1)
    assert answers == [reference[:64] for reference in own_reference[:4]]


def test_one_sample_overfits_and_every_full_block_is_accepted(
    servers, target_dir, own_prompts, own_reference, tmp_path
):
    """Init, train on one answer, serve: the gate that the whole path has to pass."""
    options = "--layers 2 --heads 2 --kv-heads 1 --head-dim 64 --intermediate-size 256"
    options += " --dependency-rank 0"
    draft = tmp_path / "draft"
    assert main(["init", "--target", str(target_dir), "--out", str(draft), *options.split()]) == 0
    prompt, answer = own_prompts[0], own_reference[0][:64]
    target = LocalTarget(target_dir)
    cache = FeatureCache(target, [Sample.continuation(prompt + answer, len(prompt))])
    drafter = Drafter.load(draft)
    recipe = Recipe(steps=300, batch=1, anchors=64, lr=3e-3, warmup_steps=10, every=300)
    trainer = Trainer(drafter, target, cache, {"train": cache}, recipe, tmp_path / "work")
    trainer.run(tmp_path / "trained")
    print(f"simulated on the sample itself: {trainer.records[-1]['held_out']['train']}")
    server = servers.get("overfit", target_dir, *FP32, *hyperdflash_arguments(tmp_path / "trained"))
    # 1 token of the prefill and nine full blocks of seven.
    result = greedy(server, prompt, len(answer))
    servers.stop("overfit")
    assert result["output_ids"] == answer
    accepted, rounds, histogram = counters(result["meta_info"])
    assert (accepted, rounds, histogram) == (54, 9, [0, 0, 0, 0, 0, 0, 9])


@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_regenerated_answers_are_the_targets_own(
    hyper_server, target_server, target_dir, tokenizer, tmp_path, turns
):
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:2]
    questions = [json.loads(line)["messages"][-1]["content"] for line in lines]
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(json.dumps({"turns": questions[:turns]}) + "\n")
    arguments = ["--server", hyper_server.url, "--target", str(target_dir), "--input", str(data)]
    options = ["--temperature", "0", "--max-new-tokens", "24"]
    assert main(["regenerate", *arguments, "--output", str(out), *options]) == 0
    record = json.loads(out.read_text())
    (sample,) = record["samples"]
    tokens = sample["tokens"]
    assert len(sample["spans"]) == turns
    for i, (start, end) in enumerate(sample["spans"]):
        assert tokens[:start] == chat_ids(tokenizer, record["messages"][: 2 * i + 1])
        plain = target_server.generate(
            input_ids=tokens[:start], sampling_params={"temperature": 0, "max_new_tokens": 24}
        )
        assert tokens[start:end] == plain["output_ids"]
