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

from tests.engine.v4.checkpoint import CONFIG

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
        vocabulary = CONFIG["vocab_size"]
        return [token if j < right else (token + 1) % vocabulary for j, token in enumerate(truth)]


def install() -> None:
    """Stand between the drafter and verification. Seams: two methods of ``DFlashWorkerV2``."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    oracle = Oracle(os.environ[ANSWERS]) if ANSWERS in os.environ else None
    sink = open(os.environ[OWN_DRAFTS], "a") if OWN_DRAFTS in os.environ else None  # noqa: SIM115
    generate = DFlashWorkerV2.forward_batch_generation
    sample = DFlashWorkerV2._greedy_sample_from_vocab_parallel_head
    current, seen = [], set()

    def forward_batch_generation(self, batch, *args, **kwargs):
        current[:] = [batch]
        kind = (batch.forward_mode.name, batch.seq_lens_cpu is not None)
        if kind not in seen:
            seen.add(kind)
            print("V4: mode and lengths on the host:", *kind, flush=True)
        return generate(self, batch, *args, **kwargs)

    def propose(self, hidden_states, lm_head, **options):
        found = sample(self, hidden_states=hidden_states, lm_head=lm_head, **options)
        found = found.view(-1, int(self.block_size) - 1).clone()
        rounds = zip(
            current[0].reqs,
            current[0].seq_lens.tolist(),
            self._draft_block_ids_buf[: len(found), 0].tolist(),
            found.tolist(),
            strict=True,
        )
        for i, (request, length, anchor, own) in enumerate(rounds):
            if sink is not None:
                sink.write(json.dumps([request.rid, length, anchor, own]) + "\n")
                sink.flush()
            if oracle is not None:
                drafts = oracle.drafts(list(request.origin_input_ids), length, anchor, own)
                found[i] = found.new_tensor(drafts)
        return found.view(-1)

    DFlashWorkerV2.forward_batch_generation = forward_batch_generation
    DFlashWorkerV2._greedy_sample_from_vocab_parallel_head = propose
