"""``python -m eval.copies``: what copies alone would accept of given texts, without a drafter.

The operator's reference copies, and the text itself is the target: a draft is accepted while it is
the text's next token. Texts are code edits, the old file as prompt and the new one as answer, and
the assistant's turns of conversations, each after what was said before.

    python -m eval.copies --tokenizer FOLDER --conversations math.jsonl --out build/copies.json
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eval.options import EXAMPLE
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops.copies import KINDS, copy_drafts, parts

ROOT, BATCH = EXAMPLE.parent.parent, 16
LARGEST = 20_000  # bytes of a file
Text = tuple[list[int], list[int]]  # prompt and answer


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def edits(count: int, last: str) -> Iterator[tuple[str, str]]:
    """Before and after of the first Python file that each of so many commits changed."""
    log = git("log", "--diff-filter=M", "--name-only", "--format=%x00%H", last, "--", "*.py")
    for commit in log.split("\0")[1:]:
        name, path, *_ = commit.split()
        before, after = (git("show", f"{at}:{path}") for at in (f"{name}^", name))
        if max(len(before), len(after)) <= LARGEST:
            yield before, after
            count -= 1
        if not count:
            return


def turns(path: Path, count: int) -> Iterator[tuple[str, str]]:
    """The assistant's turns of a file's first conversations."""
    for _, (_, line) in zip(range(count), read_lines(path), strict=False):
        said = ""
        for message in line["messages"]:
            if message["role"] == "assistant":
                yield said, message["content"]
            said += message["content"] + "\n"


@torch.no_grad()
def followed(texts: list[Text], drafts: int) -> Iterator[tuple[int, int]]:
    """The kind of match, and the accepted copies, of every round of every text."""
    size = 1 << max(len(prompt) + len(answer) for prompt, answer in texts).bit_length()
    history = torch.full((len(texts), size), -1, dtype=torch.int32)
    for row, (prompt, _) in zip(history, texts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows = torch.full((len(texts), 2 * drafts + 1), -1)
    rows[:, -1] = 0
    counts = torch.zeros(2, KINDS, 2, dtype=torch.int32)
    # The last token of a prompt is the first anchor: it is committed by a round of its own.
    ends = [len(prompt) - 1 for prompt, _ in texts]
    whole = [prompt + answer for prompt, answer in texts]
    accepted = [0] * len(texts)
    running = list(range(len(texts)))
    while running:
        lengths = torch.tensor([accepted[i] + 1 for i in running], dtype=torch.int32)
        new = [whole[i][ends[i] : ends[i] + drafts + 1] for i in running]
        tokens = torch.tensor([one + [0] * (drafts + 1 - len(one)) for one in new])
        batch, none = rows[: len(running)], torch.zeros(len(running), 0, dtype=torch.int64)
        given = torch.tensor(running), torch.tensor([ends[i] - 1 for i in running]), tokens
        greedy = torch.ones(len(running), dtype=torch.int32)
        copy_drafts(history, *given, lengths, none, greedy, batch, counts, 1 << 30)
        copies, _, kinds = (part.tolist() for part in parts(batch))
        still = []
        for i, copy, kind in zip(running, copies, kinds, strict=True):
            ends[i] += accepted[i] + 1
            left = whole[i][ends[i] :]
            if not left:
                continue
            right = (a == b for a, b in zip(copy, left, strict=False))
            accepted[i] = next((k for k, same in enumerate(right) if not same), len(left))
            accepted[i] = min(accepted[i], drafts, len(left) - 1)
            yield kind, accepted[i]
            still.append(i)
        running = still


def measured(texts: list[Text], drafts: int) -> dict[str, Any]:
    """Accept length, and how copies of every kind of match fare."""
    texts = sorted((t for t in texts if t[0] and t[1]), key=lambda t: len(t[0]) + len(t[1]))
    rounds = []
    for i in range(0, len(texts), BATCH):
        rounds += followed(texts[i : i + BATCH], drafts)

    def of(kind: int) -> dict[str, float]:
        accepted = [n for match, n in rounds if match == kind]
        some = max(len(accepted), 1)
        return {
            "rounds": len(accepted) / len(rounds),
            "first draft right": sum(n > 0 for n in accepted) / some,
            "accepted": sum(accepted) / some,
        }

    tokens = sum(len(answer) for _, answer in texts)
    tau = sum(n + 1 for _, n in rounds) / len(rounds)
    kinds = {f"matches of {4 * k - 1} tokens and more": of(k) for k in range(1, KINDS)}
    return {"texts": len(texts), "tokens": tokens, "accept length": tau, **kinds}


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
        each = {f"{n} drafts": measured(texts, n) for n in args.drafts}
        result["sources"][name] = each
        for drafts, numbers in each.items():
            print(f"{name}, {drafts}: accept length {numbers['accept length']:.2f}")
    write_json(args.out, result, indent=1)


if __name__ == "__main__":
    main()
