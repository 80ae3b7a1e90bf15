"""A target's own answers as training files: half greedy, half at temperature 1.

    python examples/tiny_deepseek_v4/own_answers.py --out build/own
    python examples/tiny_deepseek_v4/own_answers.py --prompts DIR --target TARGET --out build/own

Prompts are the corpus's, or ``DIR/train.jsonl`` and ``DIR/held_out.jsonl`` with a line
``{"kind": ..., "messages": [...]}`` each. Writes ``greedy.jsonl`` and ``sampled.jsonl``, and for
every kind of text ``held_out_KIND.jsonl`` and ``held_out_KIND_sampled.jsonl``, the exact tokens in
each; a file that is there is kept. ``hyperdflash regenerate`` does the same through a server.
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
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.ownership import claim, location
from sglang_hyperdflash.training.local_target import LocalTarget

HERE = Path(__file__).resolve().parent


def corpus_prompts(tokenizer) -> dict[str, dict[str, list[list[int]]]]:
    """``{part: {kind: prompts}}`` of the corpus."""
    split = corpus.load()
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


def by_length(prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` of them, the shortest first: they are answered together."""
    return sorted(continuations.spread(prompts, count), key=len)


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
    parser.add_argument("--prompts", type=Path, help="folder of train.jsonl and held_out.jsonl")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--per-kind",
        type=int,
        default=5000,
        help="training prompts of each kind; twice as many scrambled ones",
    )
    parser.add_argument(
        "--held-out", type=int, default=continuations.HELD_OUT_PROMPTS, help="prompts of each kind"
    )
    parser.add_argument("--length", type=int, default=continuations.MAX_NEW, help="tokens")
    parser.add_argument("--batch", type=int, default=continuations.GENERATION_BATCH)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    if args.prompts is None:
        prompts = corpus_prompts(tokenizer)
    else:
        prompts = prompts_of_files(tokenizer, args.prompts)
    for kind, own in prompts["train"].items():
        prompts["train"][kind] = by_length(own, args.per_kind * corpus.WEIGHTS.get(kind, 1))
    for kind, own in prompts["held_out"].items():
        prompts["held_out"][kind] = by_length(own, args.held_out)
    settings = {part: short_hash(kinds) for part, kinds in prompts.items()}
    settings |= {"target": location(args.target), "length": args.length, "batch": args.batch}
    try:
        with claim(args.out, "own_answers.py", settings):
            write_answers(target, prompts, args)
    except HyperDFlashError as error:
        raise SystemExit(str(error)) from error


def write_answers(
    target: LocalTarget, prompts: dict[str, dict[str, list[list[int]]]], args: argparse.Namespace
) -> None:
    """Every file that is not there yet."""

    def write(name: str, chosen: list[list[int]], temperature: float) -> None:
        path = args.out / f"{name}.jsonl"
        if not path.is_file():
            lines = answers(target, chosen, temperature, args.length, args.batch)
            write_text(path, "".join(f"{line}\n" for line in lines))
            print(path, flush=True)

    for kind, chosen in prompts["held_out"].items():
        write(f"held_out_{kind}", chosen, 0.0)
        write(f"held_out_{kind}_sampled", chosen, 1.0)
    chosen = prompts["train"].values()
    write("greedy", [prompt for kind in chosen for prompt in kind[0::2]], 0.0)
    write("sampled", [prompt for kind in chosen for prompt in kind[1::2]], 1.0)


if __name__ == "__main__":
    main()
