"""What was trained is what is served: the same drafts, an overfit block, the target's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.algorithm import propose_block
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample, States, collate
from sglang_hyperdflash.training.trainer import Trainer
from tests.conftest import EXAMPLE
from tests.engine import probes
from tests.engine.conftest import FP32, chat_ids, greedy, install_plugin
from tests.engine.drafters import assert_varied, rescale_folder

pytestmark = pytest.mark.xdist_group("pair")


def recorded(path: Path, tokens: list[int], start: int) -> list[tuple[int, list[int]]]:
    """The blocks of one finished request, with the position of each anchor in ``tokens``."""
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
    server: Server, log: Path, target_dir, draft, prompts, length: int, share: float = 1 / 3
) -> list[list[int]]:
    """Ask one by one, and assert that training proposes the tokens that the server proposed.

    Args:
        log: the server's recorded blocks. share: of the blocks that must be distinct.

    Returns:
        Prompts and answers.
    """
    log.unlink(missing_ok=True)
    target, compared, texts = LocalTarget(target_dir), [], []
    drafter = Drafter.load(draft).eval()
    replay = Replay(drafter, target)
    for prompt in prompts:
        tokens = prompt + greedy(server, prompt, length)["output_ids"]
        blocks = recorded(log, tokens, len(prompt))
        sample = Sample.continuation(tokens, len(prompt))
        layers = drafter.config.captured_layers
        source = FeatureCache(target, [sample], dtype=torch.float32, layer_ids=layers)
        ours = replayed(replay, sample, source.states([0]), [at for at, _ in blocks])
        assert ours == [drafts for _, drafts in blocks]
        at, block = blocks[len(blocks) // 2]
        if not layers:
            assert propose_block(target, drafter, tokens[: at + 1]) == block
        compared += ours
        texts.append(tokens)
    assert len(compared) >= 15 * len(prompts)
    assert_varied(compared, share)
    return texts


def test_training_and_server_propose_the_same_tokens(
    hyper_server, probe_folder, target_dir, drafter_dir, own_prompts
):
    """In 100 rounds and more, fp32: the same six tokens from the same context."""
    log = probe_folder / "blocks.jsonl"
    compare_drafts(hyper_server, log, target_dir, drafter_dir, own_prompts[:6], 96)


@pytest.mark.slow
def test_a_drafter_of_layers_proposes_the_same_tokens_and_loses_nothing(
    servers, target_dir, own_prompts, own_reference, tmp_path
):
    """An untrained DFlash-style drafter: nearly every draft is rejected."""
    draft, log = tmp_path / "draft", tmp_path / "blocks"
    options = "--layer-ids 1 3 --layers 1 --intermediate-size 128 --dependency-rank 0"
    assert main(["init", "--target", str(target_dir), "--out", str(draft), *options.split()]) == 0
    rescale_folder(draft)
    environment = install_plugin(tmp_path, "probes", probes.PLUGIN) | {probes.BLOCKS: str(log)}
    arguments = (*FP32, *hyperdflash_arguments(draft))
    server = servers.get("layers", target_dir, *arguments, environment=environment)
    texts = compare_drafts(server, log, target_dir, draft, own_prompts[:4], 64, share=0.1)
    servers.stop("layers")
    for text, prompt, answer in zip(texts, own_prompts, own_reference, strict=False):
        assert text == prompt + answer[:64]


def overfit(servers, target_dir, prompt, answer, folder: Path, options: str) -> None:
    """Init, train on one answer, serve: every full block must be accepted."""
    shape = "--layers 2 --heads 2 --kv-heads 1 --head-dim 64 --intermediate-size 256"
    draft = ["--out", str(folder / "draft"), *shape.split(), *options.split()]
    assert main(["init", "--target", str(target_dir), *draft]) == 0
    target = LocalTarget(target_dir)
    cache = FeatureCache(target, [Sample.continuation(prompt + answer, len(prompt))])
    drafter = Drafter.load(folder / "draft")
    recipe = Recipe(steps=300, batch=1, anchors=64, lr=3e-3, warmup_steps=10, every=300)
    Trainer(drafter, target, cache, {"train": cache}, recipe, folder / "work").run(
        folder / "trained"
    )
    arguments = hyperdflash_arguments(folder / "trained")
    server = servers.get("overfit", target_dir, *FP32, *arguments)
    # 1 token of the prefill and nine full blocks of seven.
    result = greedy(server, prompt, len(answer))
    servers.stop("overfit")
    assert result["output_ids"] == answer
    assert counters(result["meta_info"]) == (54, 9, [0, 0, 0, 0, 0, 0, 9])


@pytest.mark.slow
def test_one_sample_overfits_and_every_full_block_is_accepted(
    servers, target_dir, own_prompts, own_reference, tmp_path
):
    answer = own_reference[0][:64]
    overfit(servers, target_dir, own_prompts[0], answer, tmp_path, "--dependency-rank 0")


def test_regenerated_answers_are_the_targets_own(
    hyper_server, target_server, target_dir, tokenizer, tmp_path
):
    """A conversation of two turns, through ``hyperdflash regenerate``."""
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:2]
    questions = [json.loads(line)["messages"][-1]["content"] for line in lines]
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(json.dumps({"turns": questions}) + "\n")
    arguments = ["--server", hyper_server.url, "--target", str(target_dir), "--input", str(data)]
    options = ["--temperature", "0", "--max-new-tokens", "24"]
    assert main(["regenerate", *arguments, "--output", str(out), *options]) == 0
    record = json.loads(out.read_text())
    (sample,) = record["samples"]
    tokens = sample["tokens"]
    assert len(sample["spans"]) == 2
    for i, (start, end) in enumerate(sample["spans"]):
        assert tokens[:start] == chat_ids(tokenizer, record["messages"][: 2 * i + 1])
        sampling = {"temperature": 0, "max_new_tokens": 24}
        plain = target_server.generate(input_ids=tokens[:start], sampling_params=sampling)
        assert tokens[start:end] == plain["output_ids"]
