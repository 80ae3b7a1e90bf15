"""Write held-out prompts of the three kinds, for ``hyperdflash demo --prompts`` and ``eval``.

    python examples/tiny_deepseek_v4/held_out_prompts.py --data-dir DIR --out build/held_out.jsonl
    python examples/tiny_deepseek_v4/held_out_prompts.py --data-dir DIR --out build/held_out

A ``.jsonl`` path receives all kinds in the demo's form; a folder one benchmark file a kind.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, default=20)
    args = parser.parse_args()

    split = corpus.load(args.data_dir)
    chosen = {kind: split[kind]["held_out"][: args.per_kind] for kind in corpus.KINDS}
    if args.out.suffix == ".jsonl":
        args.out.parent.mkdir(parents=True, exist_ok=True)
        entries = [{"kind": kind, "messages": m[:1]} for kind in chosen for m in chosen[kind]]
        records = {args.out: entries}
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        records = {
            args.out / f"{kind}.jsonl": [{"turns": [m[0]["content"]]} for m in chosen[kind]]
            for kind in chosen
        }
    for path, entries in records.items():
        lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
