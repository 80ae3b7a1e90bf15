"""What was trained is what is served: the same drafts, an overfit block, the target's answers."""

import json
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample, States, collate
from sglang_hyperdflash.training.trainer import Trainer
from tests.conftest import EXAMPLE
from tests.engine import probes
from tests.engine.asking import UNPROCESSED, assert_cases
from tests.engine.conftest import FP32, chat_ids, greedy, greedy_all, ids, probed
from tests.engine.drafters import assert_varied, rescale_folder, with_head
from tests.unit.training.conftest import FeatureCache
from tests.unit.triton_ops.test_copies import searched

pytestmark = pytest.mark.xdist_group("pair")


def served_blocks(
    server: Server, log: Path, prompts: list[list[int]], length: int, turns: int
) -> list[tuple[Sample, list[int], list[list[int]]]]:
    """Answers to prompts asked so many times, anchors of whole blocks in ``log``, drafts.

    Of blocks with a draft that is copied against the drafter, only the copies are looked at: those
    of all blocks are what follows in their own request's text.
    """
    log.unlink(missing_ok=True)
    texts: dict[str, list[int]] = {}
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    for turn in range(turns):
        names = [f"{turn} {i}" for i in range(len(prompts))]
        said = server.generate(input_ids=prompts, rid=names, sampling_params=sampling)
        each = zip(names, prompts, said, strict=True)
        texts |= {name: prompt + answer["output_ids"] for name, prompt, answer in each}
    anchors, drafts = ({name: [] for name in texts} for _ in range(2))
    lines = map(json.loads, log.read_text().splitlines())
    for request, place, (anchor, *block), copies, firsts in lines:
        if place >= len(texts.get(request, ())):
            continue
        assert anchor == texts[request][place]
        assert copies == searched(texts[request][: place + 1], len(copies))[0]
        # Only a causal drafter's narrow block is the start of a whole one.
        if len(block) == 6 and block == firsts:
            anchors[request].append(place)
            drafts[request].append(block)
    samples = {name: Sample.continuation(tokens, 1) for name, tokens in texts.items()}
    return [(samples[name], anchors[name], drafts[name]) for name in texts]


def replayed(replay: Replay, sample: Sample, states: States, anchors: list[int]) -> list[list[int]]:
    """The drafts that training proposes at ``anchors`` of one text."""
    at = torch.tensor([anchors])
    return replay.draft(collate([sample]), states, at, torch.ones_like(at).bool())[0].tolist()


def compare_drafts(
    server, log: Path, target_dir, draft, prompts, length, *, turns=1, least, share=1 / 3
) -> None:
    """Training proposes what the server did, ``least`` blocks, a ``share`` of them distinct."""
    target, drafter = LocalTarget(target_dir), Drafter.load(draft).eval()
    replay, compared = Replay(drafter, target), []
    for sample, anchors, drafts in served_blocks(server, log, prompts, length, turns):
        layers = drafter.config.captured_layers
        source = FeatureCache(target, [sample], dtype=torch.float32, layer_ids=layers)
        assert replayed(replay, sample, source.states([0]), anchors) == drafts
        compared += drafts
    assert len(compared) >= least
    assert_varied(compared, share)


def test_training_and_server_propose_the_same_tokens(
    hyper_server, probe_folder, target_dir, drafter_dir, own_prompts
):
    """In 100 rounds and more, fp32: the same six tokens from the same context."""
    log = probe_folder / "blocks.jsonl"
    compare_drafts(hyper_server, log, target_dir, drafter_dir, own_prompts[:6], 96, least=100)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers", "causal"])
def test_a_random_drafter_proposes_the_same_tokens_and_loses_nothing(
    servers, target_dir, drafter_dir, own_prompts, baseline, tmp_path, kind
):
    """A DFlash-style drafter, or a causal one with a dependency head: most drafts are rejected."""
    draft, log = tmp_path / "draft", tmp_path / "blocks.jsonl"
    if kind == "causal":
        with_head(drafter_dir, draft, causal=True)
    else:
        shape = "--layer-ids 1 3 --layers 1 --intermediate-size 128 --dependency-rank 0"
        options = ["--target", str(target_dir), "--out", str(draft), *shape.split()]
        assert main(["init", *options]) == 0
        rescale_folder(draft)
    arguments, environment = hyperdflash_arguments(draft), probed(tmp_path, probes.BLOCKS)
    server = servers.get(kind, target_dir, *FP32, *arguments, environment=environment)
    compare_drafts(server, log, target_dir, draft, own_prompts[:4], 64, least=60, share=0.1)
    assert ids(greedy_all(server, own_prompts, 8)) == baseline["own"]
    assert_cases(server, UNPROCESSED, own_prompts, baseline)
    servers.stop(kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", ["--dependency-rank 0", "--causal --dependency-rank 16 --dependency-top-k 32"]
)
def test_one_sample_overfits_and_every_full_block_is_accepted(
    servers, target_dir, own_prompts, own_reference, tmp_path, head
):
    shape = "--layers 2 --heads 2 --kv-heads 1 --head-dim 64 --intermediate-size 256"
    draft = ["--out", str(tmp_path / "draft"), *shape.split(), *head.split()]
    assert main(["init", "--target", str(target_dir), *draft]) == 0
    target, prompt, answer = LocalTarget(target_dir), own_prompts[0], own_reference[0][:64]
    cache = FeatureCache(target, [Sample.continuation(prompt + answer, len(prompt))])
    drafter, trained = Drafter.load(tmp_path / "draft"), tmp_path / "trained"
    recipe = Recipe(steps=300, batch=1, anchors=64, lr=3e-3, warmup_steps=10, every=300)
    Trainer(drafter, target, cache, {"train": cache}, recipe, tmp_path / "work").run(trained)
    arguments = hyperdflash_arguments(trained)
    server = servers.get("overfit", target_dir, *FP32, *arguments)
    # 1 token of the prefill and nine full blocks of seven.
    result = greedy(server, prompt, len(answer))
    servers.stop("overfit")
    assert result["output_ids"] == answer
    assert counters(result["meta_info"]) == (54, 9, [0, 0, 0, 0, 0, 0, 9])


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
