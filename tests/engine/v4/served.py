"""What a HYPERDFLASH server says of one text, row by row, next to another implementation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.v4.checkpoint import CONFIG
from tests.engine.v4.findings import note
from tests.engine.v4.golden import Golden, logit_error, path_error, transformers
from tests.engine.v4.serve import ask, start
from tests.engine.v4.trace import RESIDUALS

VOCABULARY, PATHS = CONFIG["vocab_size"], CONFIG["hc_mult"]
ANSWER, DECODED = 96, 64
# An engine's distance from another, in distances of bf16 from fp32.
ALLOWED = 1.25
Bounded = tuple[list[float], list[float]]


def within(distance: list[float], bound: list[float]) -> bool:
    """Whether prefill and decoded rows both stay within the bound."""
    return all(a <= ALLOWED * b for a, b in zip(distance, bound, strict=True))


@dataclass(frozen=True)
class Text:
    """What a server said of one text, and transformers of it, its K/V rounded as V4's pages do.

    tokens: of the prompt and of the answer's begin; the last ``R`` of them were asked for.
    logprobs, residual: of the server, ``[R, V]`` and ``[R, m, d]``. accepted: drafts of the answer.
    """

    answer: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    residual: torch.Tensor
    log: str
    accepted: int
    exact: Golden
    bf16: Golden

    def medians(self, error: Callable, a: torch.Tensor, b: torch.Tensor) -> list[float]:
        """Median distances over the prefill's rows and over the decoded ones."""
        rows = error(*(x[-len(self.logprobs) :] for x in (a, b)))
        return [float(part.median()) for part in (rows[:-DECODED], rows[-DECODED:])]

    def explained(self, logits: torch.Tensor) -> Bounded:
        """Distance of the server from ``logits`` ``[S, V]``, and that of bf16 from fp32."""
        return (
            self.medians(logit_error, self.logprobs, logits),
            self.medians(logit_error, self.bf16.logits, self.exact.logits),
        )

    def assert_paths(self, residual: torch.Tensor, what: str) -> None:
        """Path by path, the server's residual is ``residual`` ``[S, m, d]`` but for rounding."""
        for i in range(PATHS):
            ours, exact = self.residual[:, i], self.exact.residual[:, i]
            distance = self.medians(path_error, ours, residual[:, i])
            bound = self.medians(path_error, self.bf16.residual[:, i], exact)
            note(f"{what}: residual of path {i}", distance=distance, of_bf16=bound)
            assert within(distance, bound), i
            for other in set(range(PATHS)) - {i}:
                crossed = self.medians(path_error, ours, residual[:, other])
                assert min(crossed) > 2 * max(distance), "paths could be in any order"


def serve_text(
    servers,
    name: str,
    target: Path,
    drafter: Path,
    prompt: list[int],
    folder: Path,
    first: int = 0,
    **environment: str,
) -> Text:
    """The prompt and the first ``DECODED`` tokens of the server's greedy answer.

    Args:
        folder: a place for the plugin and the residual. first: the first position to compare.
        environment: what the plugin reads.
    """
    environment[RESIDUALS] = str(folder / "residuals.pt")
    arguments = hyperdflash_arguments(drafter)
    server = start(servers, name, target, folder, *arguments, **environment)
    options = {"return_logprob": True, "logprob_start_len": first, "top_logprobs_num": VOCABULARY}
    (answer,) = ask(server, [prompt], ANSWER, **options)
    servers.stop(f"v4-{name}")
    meta, tokens = answer["meta_info"], prompt + answer["output_ids"][:DECODED]
    top = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    logprobs = torch.empty(len(tokens) - first, VOCABULARY)
    for row, entries in zip(logprobs, top, strict=False):
        values, places, _ = zip(*entries, strict=True)
        row[torch.tensor(places)] = torch.tensor(values)
    rows = torch.load(folder / "residuals.pt")
    residual = torch.stack([rows[i] for i in range(first, len(tokens))]).float()
    return Text(
        answer["output_ids"],
        tokens,
        logprobs,
        residual.unflatten(-1, (PATHS, -1)),
        server.log.read_text(errors="replace"),
        meta["spec_num_correct_drafts"],
        *(
            transformers(target, dtype, tokens, DECODED)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    )
