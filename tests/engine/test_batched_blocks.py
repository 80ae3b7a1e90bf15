"""Blocks of requests that share a batch: every one is the trainer's.

A block that reads another request's draft K/V, or an older one of its own, is another block. Rows
wait, slots are used again, prompts come in chunks, windows move on, and prefixes are cached.
"""

from __future__ import annotations

import json

import pytest
import torch

from sglang_hyperdflash.draft.algorithm import propose_block
from sglang_hyperdflash.serving.width.settings import RANDOM, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample
from tests.engine.conftest import FP32, SMALL_POOL, install_plugin
from tests.engine.drafters import assert_varied, with_window
from tests.engine.test_train_and_serve import RECORDER, replayed

LENGTH = 48
SERVERS = {
    "plain": (None, ("--max-running-requests", "3")),
    # Slots change hands, and requests are retracted, while rows wait.
    "small pool": (None, SMALL_POOL),
    "window": (32, ("--chunked-prefill-size", "32")),
}


def ask(server, prompts: list[list[int]], names: list[str]) -> dict[str, list[int]]:
    """Prompts and greedy answers by request; one call, so that they share batches."""
    sampling = {"temperature": 0.0, "max_new_tokens": LENGTH, "ignore_eos": True}
    answers = server.generate(input_ids=prompts, rid=names, sampling_params=sampling)
    each = zip(names, prompts, answers, strict=True)
    return {name: prompt + answer["output_ids"] for name, prompt, answer in each}


@pytest.mark.parametrize("name", SERVERS)
def test_every_block_reads_its_own_request_alone(
    servers, target_dir, drafter_dir, own_prompts, tmp_path, name
):
    window, options = SERVERS[name]
    folder, log = drafter_dir, tmp_path / "blocks.jsonl"
    if window is not None:
        folder = with_window(drafter_dir, tmp_path / "windowed", window)
    environment = install_plugin(tmp_path, "recorder", RECORDER)
    environment |= {"RECORDED_BLOCKS": str(log), WIDTH: RANDOM, WIDTHS: "1,7"}
    arguments = (*FP32, *hyperdflash_arguments(folder), *options)
    server = servers.get(f"batches {name}", target_dir, *arguments, environment=environment)
    prompts = own_prompts[:8]
    texts = ask(server, prompts, [f"first {i}" for i in range(8)])
    # Again: the radix cache has all but the last token.
    texts |= ask(server, prompts, [f"again {i}" for i in range(8)])
    servers.stop(f"batches {name}")
    blocks: dict[str, list] = {}
    for line in log.read_text().splitlines():
        request, *block = json.loads(line)
        if request in texts and block[0] < len(texts[request]):
            blocks.setdefault(request, []).append(block)
    check_blocks(target_dir, folder, prompts, texts, blocks)


def check_blocks(target_dir, folder, prompts, texts, blocks) -> None:
    """Blocks of every request against the trainer's, and one of each against the plain decoder."""
    target = LocalTarget(target_dir)
    drafter, compared = Drafter.load(folder).eval(), []
    replay = Replay(drafter, target)
    for request, tokens in texts.items():
        prompt = prompts[int(request.split()[1])]
        sample = Sample.continuation(tokens, len(prompt))
        states = FeatureCache(target, [sample], dtype=torch.float32).states([0])
        anchors = [at for at, *_ in blocks[request]]
        drafts = [block for _, _, *block in blocks[request]]
        assert replayed(replay, sample, states, anchors) == drafts
        at, anchor, *block = blocks[request][-1]
        assert anchor == tokens[at]
        assert propose_block(target, drafter, tokens[: at + 1]) == block
        compared += drafts
    assert len(texts) == 16 and len(compared) >= 100
    assert_varied(compared)
