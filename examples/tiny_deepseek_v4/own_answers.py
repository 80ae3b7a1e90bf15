"""A target's own answers as training files: half greedy, half at temperature 1.

    python examples/tiny_deepseek_v4/own_answers.py --data-dir DIR --out build/own
    python examples/tiny_deepseek_v4/own_answers.py --prompts DIR --target TARGET --out build/own

Prompts are the corpus's, or ``DIR/train.jsonl`` and ``DIR/held_out.jsonl`` with a line
``{"kind": ..., "messages": [...]}`` each. Writes ``train.jsonl``, and for every kind of text
``held-KIND-greedy.jsonl`` and ``held-KIND-sampled.jsonl``, the exact tokens in each; a file that is
there is kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

import continuations
import corpus
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.training.local_target import LocalTarget

HERE = Path(__file__).resolve().parent
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


def corpus_prompts(tokenizer, data_dir: Path) -> dict[str, dict[str, list[list[int]]]]:
    """``{part: {kind: prompts}}`` of the corpus."""
    split = corpus.load(data_dir)
    return {
        part: {k: continuations.prompts_of(tokenizer, split[k][part]) for k in corpus.KINDS}
        for part in ("train", "held_out")
    }


def prompts_of_files(tokenizer, folder: Path) -> dict[str, dict[str, list[list[int]]]]:
    """The same of two files of prompts."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    for part in ("train", "held_out"):
        kinds = found.setdefault(part, {})
        for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            prompts = continuations.prompts_of(tokenizer, [record["messages"]])
            kinds.setdefault(record.get("kind", "all"), []).extend(prompts)
    return found


def spread(prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` of them, at even distances, the shortest first: they are answered together."""
    return sorted(prompts[:: max(1, len(prompts) // count)][:count], key=len)


def answers(
    target: LocalTarget, prompts: list[list[int]], temperature: float, length: int, batch: int
) -> list[str]:
    """A line with the exact tokens of each answer of eight tokens and more."""
    generator, lines = torch.Generator().manual_seed(len(prompts)), []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        found = target.generate(
            part, max_new_tokens=length, temperature=temperature, generator=generator
        )
        for prompt, answer in zip(part, found, strict=True):
            if len(answer) >= continuations.SHORTEST_ANSWER:
                spans = [[len(prompt), len(prompt) + len(answer)]]
                lines.append(json.dumps({"samples": [{"tokens": prompt + answer, "spans": spans}]}))
        print(f"{start + len(part)} of {len(prompts)}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", type=Path, help="folder of the corpus")
    source.add_argument("--prompts", type=Path, help="folder of train.jsonl and held_out.jsonl")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, default=2000, help="training prompts of each kind")
    parser.add_argument("--held-out", type=int, default=24, help="prompts of each kind")
    parser.add_argument("--length", type=int, default=continuations.MAX_NEW, help="tokens")
    parser.add_argument("--batch", type=int, default=continuations.GENERATION_BATCH)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    if args.prompts is None:
        prompts = corpus_prompts(tokenizer, args.data_dir)
    else:
        prompts = prompts_of_files(tokenizer, args.prompts)
    args.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, chosen: dict[float, list[list[int]]]) -> None:
        path = args.out / f"{name}.jsonl"
        if not path.is_file():
            found = (answers(target, p, t, args.length, args.batch) for t, p in chosen.items())
            write_text(path, "".join(f"{line}\n" for lines in found for line in lines))
            print(path, flush=True)

    parts: dict[float, list[list[int]]] = {t: [] for t in TEMPERATURES.values()}
    for kind in prompts["train"].values():
        chosen = spread(kind, args.per_kind)
        for at, temperature in enumerate(parts):
            parts[temperature] += chosen[at :: len(parts)]
    for kind, unseen in prompts["held_out"].items():
        for name, temperature in TEMPERATURES.items():
            write(f"held-{kind}-{name}", {temperature: spread(unseen, args.held_out)})
    write("train", parts)


if __name__ == "__main__":
    main()
