"""Train the tiny target's drafter on the target's own continuations.

    python examples/tiny_deepseek_v4/train_drafter.py --data-dir DIR --target target --out drafter

Generates continuations (half greedy, half at temperature 0.7), caches the target's states, then
trains with CE + KL, the gate inherited from the target's hc_head. Both halves resume.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

import corpus
from sglang_hyperdflash.training.data import FeatureCache, Sample
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.loop import Recipe, Trainer
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.target import LocalTarget
from sglang_hyperdflash.training.target_files import TargetFacts

MAX_PROMPT, MAX_NEW, GENERATION_BATCH = 160, 128, 192
HELD_OUT_PROMPTS = 24


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


def generate(
    target: LocalTarget, prompts: list[list[int]], temperature: float, path: Path
) -> list[Sample]:
    """Continue prompts in length-sorted batches, appending to ``path``; resumes there."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    done = path.read_text().splitlines() if path.is_file() else []
    samples = [Sample.continuation(*json.loads(line)) for line in done]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_drafter"))
    parser.add_argument("--per-kind", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.work.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    split = corpus.load(args.data_dir)
    samples, held_out = [], {}
    for kind in corpus.KINDS:
        prompts = prompts_of(tokenizer, split[kind]["train"])
        step = max(1, len(prompts) // args.per_kind)
        prompts = prompts[::step][: args.per_kind]
        for temperature, part in ((0.0, prompts[0::2]), (0.7, prompts[1::2])):
            path = args.work / f"{kind}-{temperature}.jsonl"
            samples += generate(target, part, temperature, path)
        unseen = prompts_of(tokenizer, split[kind]["held_out"])
        unseen = unseen[:: max(1, len(unseen) // HELD_OUT_PROMPTS)][:HELD_OUT_PROMPTS]
        path = args.work / f"{kind}-held-out.jsonl"
        held_out[kind] = FeatureCache(target, generate(target, unseen, 0.0, path))
    samples = [s for s in samples if s.answer_tokens >= 8]
    print(f"{len(samples)} samples, {sum(len(s.tokens) for s in samples)} tokens", flush=True)

    shape = DrafterShape(layers=args.layers)
    facts = TargetFacts.from_config(target.config.to_dict())
    raw = draft_config(facts, target.hc_head, shape, tokenizer.mask_token_id)
    drafter = Drafter(raw)
    drafter.inherit(target.hc_head)
    recipe = Recipe(minutes=args.minutes)
    cache = FeatureCache(target, samples)
    trainer = Trainer(drafter, target, cache, held_out, recipe, args.work)
    with Monitor(trainer, "drafter") as monitor:
        trainer.run(args.out, monitor)


if __name__ == "__main__":
    main()
