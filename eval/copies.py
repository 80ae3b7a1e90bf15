"""``python -m eval.copies``: what copies alone would accept of given texts, without a drafter.

The operator's reference copies, and the text is its own target: a draft is accepted while it is the
text's next token. The texts are code edits, with the old file as prompt and the new one as answer,
and the assistant's turns of conversations, each after all that came before it.

    python -m eval.copies --tokenizer FOLDER --conversations math.jsonl --out build/copies.json
"""

import argparse
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eval.options import EXAMPLE
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops.copies import KINDS, copy_drafts, parts

ROOT, BATCH = EXAMPLE.parent.parent, 16
LARGEST = 20_000  # characters of a file
Text = tuple[list[int], list[int]]  # token ids of a prompt and its answer


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def edits(count: int, last: str) -> Iterator[tuple[str, str]]:
    """The first Python file that each of ``count`` commits changed, as it was and as it became."""
    log = git("log", "--diff-filter=M", "--name-only", "--format=%x00%H", last, "--", "*.py")
    for entry in log.split("\0")[1:]:
        commit, path, *_ = entry.split()
        old, new = (git("show", f"{revision}:{path}") for revision in (f"{commit}^", commit))
        if max(len(old), len(new)) <= LARGEST:
            yield old, new
            count -= 1
        if not count:
            return


def turns(path: Path, count: int) -> Iterator[tuple[str, str]]:
    """The assistant's turns of a file's first conversations, each with the text before it."""
    for _, record in islice(read_lines(path), count):
        prompt = ""
        for message in record["messages"]:
            if message["role"] == "assistant":
                yield prompt, message["content"]
            prompt += message["content"] + "\n"


@torch.no_grad()
def followed(texts: list[Text], drafts: int) -> Iterator[tuple[int, int]]:
    """The kind of match, and the number of accepted copies, of every round of every text."""
    size = 1 << max(len(prompt) + len(answer) for prompt, answer in texts).bit_length()
    history = torch.full((len(texts), size), -1, dtype=torch.int32)
    for row, (prompt, _) in zip(history, texts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows = torch.full((len(texts), 2 * drafts + 1), -1)
    rows[:, -1] = 0
    counts = torch.zeros(2, KINDS, 2, dtype=torch.int32)
    # The last token of a prompt is the first anchor: it is committed by a round of its own.
    ends = [len(prompt) - 1 for prompt, _ in texts]
    tokens = [prompt + answer for prompt, answer in texts]
    accepted = [0] * len(texts)
    running = list(range(len(texts)))
    while running:
        lengths = torch.tensor([accepted[i] + 1 for i in running], dtype=torch.int32)
        blocks = [tokens[i][ends[i] : ends[i] + drafts + 1] for i in running]
        padded = torch.tensor([block + [0] * (drafts + 1 - len(block)) for block in blocks])
        slots, positions = torch.tensor(running), torch.tensor([ends[i] - 1 for i in running])
        batch, no_drafts = rows[: len(running)], torch.zeros(len(running), 0, dtype=torch.int64)
        top_ks = torch.ones(len(running), dtype=torch.int32)
        state = (history, slots, positions, padded, lengths, no_drafts, top_ks, batch, counts)
        copy_drafts(*state, 1 << 30)
        copies, _, kinds = (part.tolist() for part in parts(batch))
        for i, copy, kind in zip(running, copies, kinds, strict=True):
            ends[i] += accepted[i] + 1
            remaining = tokens[i][ends[i] :]
            if remaining:
                pairs = enumerate(zip(copy, remaining, strict=False))
                first_wrong = next((k for k, (a, b) in pairs if a != b), drafts)
                accepted[i] = min(first_wrong, drafts, len(remaining) - 1)
                yield kind, accepted[i]
        running = [i for i in running if ends[i] < len(tokens[i])]


def measured(texts: list[Text], drafts: int) -> dict[str, Any]:
    """The accept length, and what copies of every kind of match reach."""
    texts = sorted((t for t in texts if t[0] and t[1]), key=lambda t: len(t[0]) + len(t[1]))
    batches = (texts[i : i + BATCH] for i in range(0, len(texts), BATCH))
    rounds = [outcome for batch in batches for outcome in followed(batch, drafts)]
    tokens = sum(len(answer) for _, answer in texts)
    tau = sum(accepted + 1 for _, accepted in rounds) / len(rounds)
    numbers = {"texts": len(texts), "tokens": tokens, "accept length": tau}
    for kind in range(1, KINDS):
        accepted = [copies for match, copies in rounds if match == kind]
        matches = max(len(accepted), 1)
        numbers[f"matches of {4 * kind - 1} tokens and more"] = {
            "rounds": len(accepted) / len(rounds),
            "first draft right": sum(copies > 0 for copies in accepted) / matches,
            "accepted": sum(accepted) / matches,
        }
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokenizer", required=True, help="folder or hub id of a tokenizer")
    add("--edits", type=int, default=40, help="commits of this repository (default: 40)")
    add("--last", default="HEAD", help="the last of these commits (default: HEAD)")
    add("--conversations", type=Path, nargs="*", default=[], help="JSONL files of messages")
    add("--count", type=int, default=200, help="conversations of a file (default: 200)")
    add("--drafts", type=int, nargs="+", default=[6, 9], help="drafts of a round (default: 6 9)")
    add("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sources = {"code edits": list(edits(args.edits, args.last))}
    sources |= {path.stem: list(turns(path, args.count)) for path in args.conversations}
    result: dict[str, Any] = {"provenance": provenance(), "sources": {}}
    for name, pairs in sources.items():
        texts = [tuple(tokenizer.encode(text) for text in pair) for pair in pairs]
        result["sources"][name] = {f"{n} drafts": measured(texts, n) for n in args.drafts}
        for drafts, numbers in result["sources"][name].items():
            print(f"{name}, {drafts}: accept length {numbers['accept length']:.2f}")
    write_json(args.out, result, indent=1)


if __name__ == "__main__":
    main()
