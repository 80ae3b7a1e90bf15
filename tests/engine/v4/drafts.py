"""Drafts that are right for a while, and what the drafter itself had proposed.

A drafter of random weights is never accepted. The oracle replaces its drafts by a right prefix of 0
to 6 tokens of a known answer, then wrong ones: every length of acceptance happens everywhere, at
page ends and window ends too.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

ANSWERS = "V4_ANSWERS"  # a JSON list of {"prompt", "ids"}
OWN_DRAFTS = "V4_OWN_DRAFTS"  # a file: [rid, length, anchor, [drafts]] a line


def right_drafts(prompt: int, at: int, block: int) -> int:
    """How many drafts of a round are right; any number below ``block``, each about as often."""
    return zlib.crc32(f"{prompt} {at}".encode()) % block


class Oracle:
    """Proposes from known answers; requests that it does not know keep their own drafts."""

    def __init__(self, answers: str) -> None:
        known = json.loads(Path(answers).read_text())
        self.known = {tuple(one["prompt"]): one["ids"] for one in known}

    def drafts(self, prompt: list[int], length: int, anchor: int, own: list[int]) -> list[int]:
        """The drafts of one round.

        Args:
            length: tokens before the anchor, prompt included. own: the drafter's.
        """
        answer, at = self.known.get(tuple(prompt)), length - len(prompt)
        if answer is None or at >= len(answer) or answer[at] != anchor:
            return own
        right = right_drafts(len(prompt), at, len(own) + 1)
        truth = answer[at + 1 : at + 1 + len(own)]
        truth += [0] * (len(own) - len(truth))
        # Another token of any vocabulary of even size.
        return [token if j < right else token ^ 1 for j, token in enumerate(truth)]


def install() -> None:
    """Stand between the drafter and verification.

    Seam: ``DFlashVerifyInput.prepare_for_verify``; every round passes it, with graphs or without;
    its ``draft_token`` is the memory that is verified.
    """
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    oracle = Oracle(os.environ[ANSWERS]) if ANSWERS in os.environ else None
    sink = open(os.environ[OWN_DRAFTS], "a") if OWN_DRAFTS in os.environ else None  # noqa: SIM115
    prepare = DFlashVerifyInput.prepare_for_verify
    seen = set()

    def prepared(self, batch, *args, **options):
        host = batch.seq_lens_cpu is not None
        if host not in seen:
            seen.add(host)
            print("V4: a round with lengths on the host:", host, flush=True)
        blocks = self.draft_token.view(len(batch.reqs), -1)
        rounds = zip(batch.reqs, batch.seq_lens.tolist(), blocks.tolist(), strict=True)
        for i, (request, length, (anchor, *own)) in enumerate(rounds):
            if sink is not None:
                sink.write(json.dumps([request.rid, length, anchor, own]) + "\n")
                sink.flush()
            if oracle is not None:
                drafts = oracle.drafts(list(request.origin_input_ids), length, anchor, own)
                blocks[i, 1:] = blocks.new_tensor(drafts)
        return prepare(self, batch, *args, **options)

    DFlashVerifyInput.prepare_for_verify = prepared
