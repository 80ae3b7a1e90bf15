"""Write held-out prompts of the three kinds, for ``hyperdflash demo --prompts``.

python examples/tiny_deepseek_v4/held_out_prompts.py --data-dir DIR --out build/held_out.jsonl
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

    args.out.parent.mkdir(parents=True, exist_ok=True)
    split = corpus.load(args.data_dir)
    with args.out.open("w", encoding="utf-8") as out:
        for kind in corpus.KINDS:
            for messages in split[kind]["held_out"][: args.per_kind]:
                record = {"kind": kind, "messages": messages[:1]}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
