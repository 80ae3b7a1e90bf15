"""What a HYPERDFLASH server says of one text, row by row, to compare with other implementations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.v4.checkpoint import CONFIG
from tests.engine.v4.conftest import NEW_TOKENS
from tests.engine.v4.serve import ask, start
from tests.engine.v4.trace import RESIDUALS, read_residuals

VOCABULARY, PATHS = CONFIG["vocab_size"], CONFIG["hc_mult"]


@dataclass(frozen=True)
class Served:
    """What a server said of one text: log-probabilities ``[R, V]``, residual ``[R, m, d]``, log.

    tokens: of the prompt and of the answer's begin; ``R`` are the last of them.
    accepted: drafts of the whole answer.
    """

    prompt: list[int]
    answer: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    residual: torch.Tensor
    log: str
    accepted: int


def whole(top: list) -> torch.Tensor:
    """``[n, V]`` from lists of ``(logprob, token, text)`` over the whole vocabulary."""
    rows = torch.empty(len(top), VOCABULARY)
    for row, entries in zip(rows, top, strict=True):
        row[torch.tensor([entry[1] for entry in entries])] = torch.tensor(
            [entry[0] for entry in entries]
        )
    return rows


def serve_text(
    servers,
    name: str,
    target: Path,
    drafter: Path,
    prompt: list[int],
    decoded: int,
    folder: Path,
    first: int = 0,
    **environment: str,
) -> Served:
    """The prompt and the first ``decoded`` tokens of the server's own greedy answer.

    Args:
        folder: an empty place for the plugin and the residual.
        first: the first position that is asked for.
        environment: what the plugin reads.
    """
    residuals = folder / "residuals"
    residuals.mkdir()
    environment[RESIDUALS] = str(residuals)
    arguments = hyperdflash_arguments(drafter)
    server = start(servers, name, target, folder, *arguments, **environment)
    for warm_up in residuals.glob("*.pt"):
        warm_up.unlink()
    options = {"return_logprob": True, "logprob_start_len": first, "top_logprobs_num": VOCABULARY}
    found = ask(server, [prompt], NEW_TOKENS, **options)[0]
    servers.stop(f"v4-{name}")
    meta = found["meta_info"]
    top = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    answer = found["output_ids"]
    tokens = prompt + answer[:decoded]
    rows = read_residuals(residuals)
    residual = torch.stack([rows[at] for at in range(first, len(tokens))]).float()
    return Served(
        prompt,
        answer,
        tokens,
        whole(top[: len(tokens) - first]),
        residual.unflatten(-1, (PATHS, -1)),
        server.log.read_text(errors="replace"),
        meta["spec_num_correct_drafts"],
    )
