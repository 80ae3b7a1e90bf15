"""The tiny target's own continuations: what its drafters train on and are held out on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch

import corpus
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import Sample

MAX_PROMPT, MAX_NEW, GENERATION_BATCH = 160, 128, 192
HELD_OUT_PROMPTS = 60
SHORTEST_ANSWER = 8


def prompts_of(tokenizer, documents) -> list[list[int]]:
    """Every prefix of a conversation that ends with a user turn, as prompt tokens."""
    texts = [
        tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        for messages in documents
        for i in range(1, len(messages) + 1)
        if messages[i - 1]["role"] == "user"
    ]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [tokens for tokens in encoded if len(tokens) <= MAX_PROMPT]


def spread(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """``count`` of them, drawn at random, always the same.

    Families come in turn: at even distances some of them would never be met.
    """
    return random.Random(count).sample(prompts, min(count, len(prompts)))


def generate(
    target: LocalTarget, prompts: list[list[int]], temperature: float, path: Path
) -> list[Sample]:
    """Continue prompts in length-sorted batches, appending to ``path``; resumes there."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    done = path.read_text().splitlines() if path.is_file() else []
    samples = [Sample.continuation(*json.loads(line)) for line in done]
    for i, sample in zip(order, samples, strict=False):
        if sample.tokens[: sample.spans[0][0]] != prompts[i]:
            raise SystemExit(
                f"{path} holds answers to other prompts. Remove it, or choose another."
            )
    generator = torch.Generator().manual_seed(len(samples))
    with path.open("a") as out:
        for start in range(len(samples), len(order), GENERATION_BATCH):
            chosen = [prompts[i] for i in order[start : start + GENERATION_BATCH]]
            answers = target.generate(
                chosen, max_new_tokens=MAX_NEW, temperature=temperature, generator=generator
            )
            for prompt, answer in zip(chosen, answers, strict=True):
                samples.append(Sample.continuation(prompt + answer, len(prompt)))
                out.write(json.dumps([samples[-1].tokens, len(prompt)]) + "\n")
            out.flush()
            print(f"{path.name}: {len(samples)}/{len(order)}", flush=True)
    return samples


def load(
    target: LocalTarget, tokenizer, work: Path, per_kind: int
) -> tuple[list[Sample], dict[str, list[Sample]]]:
    """Generate, or read back from ``work``, the training and the held-out continuations.

    Args:
        per_kind: training prompts of each kind of text, times its weight; half are continued
            greedily, half at temperature 1. Held-out prompts are continued greedily.

    Returns:
        Training samples (answers of eight tokens and more), and held-out samples by kind.
    """
    work.mkdir(parents=True, exist_ok=True)
    split = corpus.load()
    samples, held_out = [], {}
    for kind in corpus.KINDS:
        prompts = spread(
            prompts_of(tokenizer, split[kind]["train"]), per_kind * corpus.WEIGHTS[kind]
        )
        for temperature, part in ((0.0, prompts[0::2]), (1.0, prompts[1::2])):
            samples += generate(target, part, temperature, work / f"{kind}-{temperature}.jsonl")
        unseen = spread(prompts_of(tokenizer, split[kind]["held_out"]), HELD_OUT_PROMPTS)
        held_out[kind] = generate(target, unseen, 0.0, work / f"{kind}-held-out.jsonl")
    samples = [s for s in samples if s.answer_tokens >= SHORTEST_ANSWER]
    print(f"{len(samples)} samples, {sum(len(s.tokens) for s in samples)} tokens", flush=True)
    return samples, held_out
