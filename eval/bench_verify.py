"""Milliseconds between a sampled round's logits and its tokens, on one GPU; part of ``make bench``.

Rows are those of a verified round, seven a request. Contenders:

``seeded``, ``unseeded``: what a server runs: softmax, filters, draws, residual (``serving.exact``).
``before``: the verification of argmax drafts over a sorted vocabulary (``serving.verify``); today
the tests' reference.
``sglang``, ``sglang seeded``: SGLang's own sampler on as many rows: it draws, and verifies nothing.
``sglang one row``: the same for one row a request, a step of a server without speculation.

Nothing is in a CUDA graph, as nothing of it is while serving: launches count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, propose
from sglang_hyperdflash.serving.draft_temperature import DraftTemperature
from sglang_hyperdflash.serving.exact import (
    Draw,
    Draws,
    Verdict,
    verify_block,
    weights_of,
)
from sglang_hyperdflash.serving.verify import accept_sampled, target_probabilities
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops.graph_timing import events_ms, interleaved
from triton_ops.gumbel_op import gumbel_argmax

VOCABULARY, REQUESTS, BLOCK, CANDIDATES = 129_280, (1, 8, 64, 256), 7, 64
NO_TOP_K = 1 << 30
# Top-k and top-p of every request; top-p alone sorted whole rows before.
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}
CALLS = 3
Call = Callable[[], Any]


class Case:
    """One batch of equal requests: logits ``[requests * 7, V]`` fp32, drafts and their laws.

    Args:
        filters: ``top_k`` and ``top_p`` of all requests; absent ones are off.
        draw: what draws a token of each row, as :func:`verify_block` has it.
        renorm: FlashInfer's kernels, on CUDA.
    """

    def __init__(
        self,
        requests: int,
        vocabulary: int,
        filters: dict[str, Any],
        device: str,
        draw: Draw = gumbel_argmax,
        renorm: tuple[Callable, Callable] | None = None,
    ) -> None:
        self.requests, self.filters, self.device = requests, filters, device
        self.draw, self.renorm = draw, renorm
        new, rows = {"device": device}, requests * BLOCK
        self.logits = torch.randn(rows, vocabulary, **new).mul_(3)
        self.sampling = Sampling(
            torch.ones(requests, **new),
            torch.full((requests,), filters.get("top_k", NO_TOP_K), dtype=torch.int32, **new),
            torch.full((requests,), filters.get("top_p", 1.0), **new),
            torch.zeros(requests, **new),
            "top_k" in filters,
            "top_p" in filters,
        )
        self.seeds = torch.randint(0, 1 << 60, (requests,), **new)
        self.positions = torch.arange(BLOCK, **new).repeat(requests, 1) + 100
        anchor = torch.zeros(requests, dtype=torch.int64, **new)
        # Drafts as good as they get: the target's own candidates, a little off.
        leading = self.logits.view(requests, BLOCK, -1)[:, :-1].topk(min(CANDIDATES, vocabulary))
        scores = leading.values + torch.randn_like(leading.values)
        self.proposal = propose(
            Candidates(leading.indices, scores),
            anchor,
            None,
            self.sampling,
            self.seeds,
            self.positions[:, :-1],
            torch.ones(requests, **new),
        )
        self.block = torch.cat([anchor.unsqueeze(1), self.proposal.tokens], 1)
        self.coins = torch.rand(requests, BLOCK - 1, **new)
        self.bonus_coins = torch.rand(requests, **new)
        self.draft_temperature = DraftTemperature(device, requests)
        self.slots = torch.arange(requests, device=device)

    def ours(self, seeded: bool) -> Verdict:
        """A whole verification as a server runs it."""
        mine = torch.full((self.requests,), seeded, device=self.device)
        draws = Draws(self.seeds, mine, seeded, not seeded, any_greedy=False)
        weights = weights_of(self.logits, self.sampling.repeated(BLOCK), self.renorm)
        verdict = verify_block(
            self.proposal, self.logits, weights, self.sampling, draws, self.positions, self.draw
        )
        self.draft_temperature.learn(self.proposal, self.sampling, mine, self.slots, verdict)
        return verdict

    def before(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Argmax drafts over sorted rows; with top-k only so many columns were sorted."""
        each, filters = self.sampling.repeated(BLOCK), {}
        if self.filters:
            filters = {"top_ks": each.top_ks, "top_ps": each.top_ps}
            filters["max_top_k"] = self.filters.get("top_k")
        probs = target_probabilities(self.logits, each.temperatures, **filters)
        probs = probs.view(self.requests, BLOCK, -1)
        return accept_sampled(self.block, probs, self.coins, self.bonus_coins)

    def sglang(self, seeded: bool, each: int = BLOCK) -> torch.Tensor:
        """SGLang's sampler on ``each`` rows of every request; on a CPU its torch path.

        Source: ``layers/sampler.py: Sampler._sample_from_probs`` with the default backend.
        """
        from sglang.srt.layers import sampler

        sampling, rows = self.sampling.repeated(each), self.requests * each
        logits = self.logits[:rows] / sampling.temperatures.unsqueeze(-1)
        probs = torch.softmax(logits, dim=-1)
        seeds = self.seeds.repeat_interleave(each) if seeded else None
        positions = self.positions.reshape(-1)[:rows]
        if not self.filters:
            return sampler.sampling_from_probs_torch(probs, seeds, positions)
        if self.device != "cpu" and not seeded:
            return sampler.top_k_top_p_sampling_from_probs(
                probs, sampling.top_ks, sampling.top_ps, filter_apply_order="joint"
            )
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs, sampling.top_ks, sampling.top_ps, sampling.min_ps, False, seeds, positions
        )

    def contenders(self) -> dict[str, Call]:
        """Calls by name; SGLang's seeded sampler needs CUDA."""
        calls: dict[str, Call] = {
            "seeded": lambda: self.ours(True),
            "unseeded": lambda: self.ours(False),
            "before": self.before,
            "sglang": lambda: self.sglang(False),
            "sglang one row": lambda: self.sglang(False, 1),
        }
        if self.device != "cpu":
            calls["sglang seeded"] = lambda: self.sglang(True)
        return calls


def time_ms(call: Call, device: str, calls: int = CALLS) -> float:
    """Milliseconds per call, of calls in a row; by CUDA events on a GPU."""

    def work() -> None:
        for _ in range(calls):
            call()

    if device != "cpu":
        return events_ms(work) / calls
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000 / calls


@torch.inference_mode()
def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median milliseconds of every contender; rounds are interleaved."""
    calls = case.contenders()
    times = interleaved(calls, lambda name: time_ms(calls[name], case.device), rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def run(
    requests: Sequence[int], vocabulary: int, rounds: int, device: str, **options: Any
) -> list[dict[str, Any]]:
    """One row for every filter and number of requests; ``options`` are those of :class:`Case`."""
    rows = []
    for name, filters in FILTERS.items():
        for count in requests:
            with torch.inference_mode():
                case = Case(count, vocabulary, filters, device, **options)
            found = measure(case, rounds)
            rows.append({"filters": name, "requests": count, "median_ms": found})
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            del case
            if device != "cpu":
                torch.cuda.empty_cache()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Median milliseconds, a line for every row."""
    names = list(rows[0]["median_ms"])
    head = f"{'filters':<20} {'requests':>8}" + "".join(f"{name:>16}" for name in names)
    lines = [head]
    for row in rows:
        cells = "".join(f"{row['median_ms'][name]:>16.3f}" for name in names)
        lines.append(f"{row['filters']:<20} {row['requests']:>8}{cells}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write ``verify.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", nargs="+", type=int, default=list(REQUESTS))
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_verify needs a CUDA device; torch found none", file=sys.stderr)
        return 2
    from sglang_hyperdflash.serving.sampled_worker import renorm_kernels

    renorm = renorm_kernels()
    rows = run(options.requests, options.vocabulary, options.rounds, "cuda", renorm=renorm)
    results = {"rows": rows, "vocabulary": options.vocabulary, "provenance": provenance()}
    write_json(options.out / "verify.json", results, indent=1)
    print(f"ms of a verification, vocabulary {options.vocabulary}, {BLOCK} rows a request")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
