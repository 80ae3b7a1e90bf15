"""The three kinds of text the tiny DeepSeek-V4 is made from, as chat conversations.

* ``math``: grade-school word problems with worked answers (``math.jsonl``),
* ``chat``: order-taking dialogues (``chat.jsonl``),
* ``code``: the Python standard library's own source files of the running interpreter, cut into
  "continue this code" exchanges.

A document is a list of ``{"role", "content"}`` messages. Every fortieth document of a kind, by
a hash of its text, is held out: it trains neither the tokenizer, nor the target, nor a drafter.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

KINDS = ("math", "code", "chat")
HELD_OUT_MODULUS = 40
CODE_BYTES = 5_000_000
CODE_PROMPT_LINES = 10
CODE_DOCUMENT_LINES = 36
CODE_PROMPT = "Continue this Python code:\n{head}"
SKIPPED_CODE = ("site-packages", "/test", "idlelib", "lib2to3", "pydoc_data", "encodings", "turtle")

Message = dict[str, str]


def read_conversations(path: Path) -> list[list[Message]]:
    """Read a JSONL file of ``{"messages": [...]}``; raise ``FileNotFoundError`` with advice."""
    if not path.is_file():
        raise FileNotFoundError(
            f"training text not found: {path}. Pass --data-dir with a folder holding "
            "math.jsonl and chat.jsonl (one {'messages': [...]} object a line)."
        )
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines if line.strip()]


def read_code() -> list[list[Message]]:
    """Cut the standard library into exchanges: ten lines asked, the next twenty-six answered."""
    root = Path(sysconfig.get_path("stdlib"))
    documents, taken = [], 0
    for path in sorted(root.rglob("*.py")):
        if any(part in str(path) for part in SKIPPED_CODE) or taken > CODE_BYTES:
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for start in range(0, len(lines) - CODE_PROMPT_LINES, CODE_DOCUMENT_LINES):
            window = lines[start : start + CODE_DOCUMENT_LINES]
            head = "\n".join(window[:CODE_PROMPT_LINES])
            tail = "\n".join(window[CODE_PROMPT_LINES:])
            if tail.strip():
                taken += len(head) + len(tail)
                documents.append(
                    [
                        {"role": "user", "content": CODE_PROMPT.format(head=head)},
                        {"role": "assistant", "content": tail},
                    ]
                )
    return documents


def is_held_out(messages: list[Message]) -> bool:
    """Whether a document is held out; depends on its text alone, never on its place in a file."""
    text = "\x00".join(message["content"] for message in messages)
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_MODULUS == 0


def load(data_dir: Path) -> dict[str, dict[str, list[list[Message]]]]:
    """Return ``{kind: {"train": [...], "held_out": [...]}}`` for the three kinds."""
    documents = {
        "math": read_conversations(data_dir / "math.jsonl"),
        "code": read_code(),
        "chat": read_conversations(data_dir / "chat.jsonl"),
    }
    split: dict[str, dict[str, list[list[Message]]]] = {}
    for kind, items in documents.items():
        split[kind] = {"train": [], "held_out": []}
        for item in items:
            split[kind]["held_out" if is_held_out(item) else "train"].append(item)
    return split
