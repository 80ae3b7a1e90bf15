"""Write the tiny target's own answers, what its drafters train on: half greedy, half sampled.

    python examples/tiny_deepseek_v4/own_answers.py --out build/study/answers

``greedy.jsonl`` and ``sampled.jsonl`` are for training; ``held_out_KIND.jsonl`` and
``held_out_KIND_sampled.jsonl`` choose checkpoints. They hold exact tokens. A file that exists is
kept. For other targets: ``hyperdflash regenerate``, which asks a server.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

import corpus
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.ownership import claim
from sglang_hyperdflash.training.local_target import LocalTarget

TARGET = Path(__file__).resolve().parent / "target"
MAX_PROMPT, MAX_NEW, BATCH = 160, 128, 192
SHORTEST_ANSWER = 8
PER_KIND, HELD_OUT = 5000, 60


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
    """``count`` of them, always the same; families come in turn, so not at even distances."""
    return random.Random(count).sample(prompts, min(count, len(prompts)))


def chosen_prompts(per_kind: int, held_out: int) -> dict[str, dict[str, list[list[int]]]]:
    """``{part: {kind: prompts}}``; the shortest first, for they are answered together."""
    tokenizer, split = AutoTokenizer.from_pretrained(TARGET), corpus.load()
    counts = {
        "train": {kind: per_kind * weight for kind, weight in corpus.WEIGHTS.items()},
        "held_out": dict.fromkeys(corpus.KINDS, held_out),
    }
    return {
        part: {
            kind: sorted(spread(prompts_of(tokenizer, split[kind][part]), count), key=len)
            for kind, count in kinds.items()
        }
        for part, kinds in counts.items()
    }


@torch.inference_mode()
def continuations(
    target: LocalTarget, prompts: list[list[int]], temperature: float, generator: torch.Generator
) -> list[list[int]]:
    """The new tokens after every prompt, until EOS or ``MAX_NEW``.

    Prompt tokens are fed one column at a time: rows of different lengths need no padding mask.
    """
    lengths = torch.tensor([len(p) for p in prompts])
    ends, limit = lengths + MAX_NEW, int(lengths.max()) + MAX_NEW
    tokens = torch.zeros(len(prompts), limit + 1, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    shortest, cache = int(lengths.min()), target.new_cache(len(prompts), limit)
    hidden, _ = target.step(tokens[:, :shortest], torch.zeros_like(lengths), cache)
    for at in range(shortest, limit):
        logits = target.lm_head(hidden[:, -1]).cpu()
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            probs = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        live = (lengths <= at) & (at < ends)
        tokens[live, at] = chosen[live]
        ends[live & (tokens[:, at] == target.config.eos_token_id)] = at + 1
        if bool((ends <= at + 1).all()):
            break
        hidden, _ = target.step(tokens[:, at : at + 1], torch.full_like(lengths, at), cache)
    return [row[a:b].tolist() for row, a, b in zip(tokens, lengths, ends, strict=True)]


def answers(target: LocalTarget, prompts: list[list[int]], temperature: float) -> list[str]:
    """A JSON line with the exact tokens of each answer of eight tokens and more."""
    generator, lines = torch.Generator().manual_seed(len(prompts)), []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        found = continuations(target, part, temperature, generator)
        for prompt, answer in zip(part, found, strict=True):
            if len(answer) >= SHORTEST_ANSWER:
                spans = [[len(prompt), len(prompt) + len(answer)]]
                lines.append(json.dumps({"samples": [{"tokens": prompt + answer, "spans": spans}]}))
        print(f"{start + len(part)} of {len(prompts)}", flush=True)
    return lines


def write_answers(out: Path, per_kind: int = PER_KIND, held_out: int = HELD_OUT) -> None:
    """Every file that is missing in ``out``; ``per_kind`` prompts times a kind's weight.

    Raises:
        HyperDFlashError: ``out`` holds answers to other prompts, or another process writes there.
    """
    prompts = chosen_prompts(per_kind, held_out)
    files = {}
    for kind, some in prompts["held_out"].items():
        files[f"held_out_{kind}"] = some, 0.0
        files[f"held_out_{kind}_sampled"] = some, 1.0
    train = prompts["train"].values()
    files["greedy"] = [prompt for some in train for prompt in some[0::2]], 0.0
    files["sampled"] = [prompt for some in train for prompt in some[1::2]], 1.0
    settings = {part: short_hash(kinds) for part, kinds in prompts.items()}
    with claim(out, "own_answers.py", settings):
        missing = [name for name in files if not (out / f"{name}.jsonl").is_file()]
        target = LocalTarget(TARGET) if missing else None
        for name in missing:
            path = out / f"{name}.jsonl"
            write_text(path, "".join(f"{line}\n" for line in answers(target, *files[name])))
            print(path, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--per-kind", type=int, default=PER_KIND, help="training prompts of each")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="prompts of each kind")
    args = parser.parse_args()
    try:
        write_answers(args.out, args.per_kind, args.held_out)
    except HyperDFlashError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
