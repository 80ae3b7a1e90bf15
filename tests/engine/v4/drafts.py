"""Drafts that are right for a while, and what the drafter itself had proposed.

A drafter of random weights is never accepted. The oracle replaces its drafts by a right prefix of
any length of a known answer, then wrong ones: each acceptance happens everywhere, at page ends and
window ends too.
"""

import json
import os
import zlib
from pathlib import Path

import torch

ANSWERS = "V4_ANSWERS"  # a JSON list of {"prompt", "ids"}
HOST_KNOWS = "V4: a round whose lengths the host knows:"
OWN_DRAFTS = "V4_OWN_DRAFTS"  # a file: [rid, length, anchor, [drafts]] a line


def right_drafts(prompt: int, at: int, block: int) -> int:
    """How many drafts of a round are right; any number below ``block``, each about as often."""
    return zlib.crc32(f"{prompt} {at}".encode()) % block


class Between:
    """Stands between a drafter and verification: writes down its drafts, asks the oracle."""

    def __init__(self) -> None:
        known = json.loads(Path(os.environ[ANSWERS]).read_text()) if ANSWERS in os.environ else []
        self.known = {tuple(one["prompt"]): one["ids"] for one in known}
        self.sink = open(os.environ[OWN_DRAFTS], "a") if OWN_DRAFTS in os.environ else None  # noqa: SIM115
        self.seen: set[bool] = set()

    def oracle(self, prompt: list[int], length: int, anchor: int, drafts: list[int]) -> list[int]:
        """The drafts of one round: the drafter's, where no answer is known.

        Args:
            length: tokens before the anchor, prompt included. drafts: the drafter's.
        """
        answer, step = self.known.get(tuple(prompt)), length - len(prompt)
        if answer is None or step >= len(answer) or answer[step] != anchor:
            return drafts
        right = right_drafts(len(prompt), step, len(drafts) + 1)
        truth = answer[step + 1 : step + 1 + len(drafts)]
        truth += [0] * (len(drafts) - len(truth))
        # Another token of any vocabulary of even size.
        return [token if j < right else token ^ 1 for j, token in enumerate(truth)]

    def round(self, tokens: torch.Tensor, batch) -> None:
        """One round's ``tokens [rows * block]``, each block after its anchor, in place."""
        if not batch.reqs:
            return
        blocks = tokens.view(len(batch.reqs), -1)
        lengths = batch.seq_lens.tolist()
        # Otherwise an upper bound, all that the host is told of a round before the last one ended.
        host = batch.seq_lens_cpu is not None and batch.seq_lens_cpu.tolist() in (
            lengths,
            [length + blocks.shape[1] for length in lengths],
        )
        if host not in self.seen:
            self.seen.add(host)
            print(HOST_KNOWS, host, flush=True)
        rounds = zip(batch.reqs, lengths, blocks.tolist(), strict=True)
        for i, (request, length, (anchor, *own)) in enumerate(rounds):
            if self.sink is not None:
                self.sink.write(json.dumps([request.rid, length, anchor, own]) + "\n")
                self.sink.flush()
            drafts = self.oracle(list(request.origin_input_ids), length, anchor, own)
            blocks[i, 1:] = blocks.new_tensor(drafts)


def install_if_asked() -> None:
    """Stand before verification, where the environment names answers or a file for drafts.

    What stands between reads lengths and drafts back every round: a server whose host waits are
    counted, or whose rounds are timed, must be without it. Seams: ``prepare_for_verify`` of
    ``DFlashVerifyInput``, EAGLE's ``eagle_prepare_for_verify``.
    """
    if ANSWERS not in os.environ and OWN_DRAFTS not in os.environ:
        return
    from sglang.srt.speculative import eagle_utils, eagle_worker_common
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    between = Between()
    prepare = DFlashVerifyInput.prepare_for_verify
    prepare_chain = eagle_utils.eagle_prepare_for_verify

    def prepared(self, batch, *args, **options):
        between.round(self.draft_token, batch)
        return prepare(self, batch, *args, **options)

    def prepared_chain(verify_input, pool, batch, worker):
        between.round(verify_input.draft_token, batch)
        return prepare_chain(verify_input, pool, batch, worker)

    DFlashVerifyInput.prepare_for_verify = prepared
    eagle_worker_common.eagle_prepare_for_verify = prepared_chain
