"""Milliseconds between a sampled round's logits and its tokens, on one GPU; part of ``make bench``.

Rows are those of a verified round, seven a request. Contenders:

``seeded``, ``unseeded``: what a server runs: softmax, filters, draws, residual
(``serving.verification.exact``).
``sglang``, ``sglang seeded``: SGLang's own sampler on as many rows: it draws, and verifies nothing.
``sglang one row``: the same for one row a request, a step of the baseline.

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
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification.exact import (
    Draws,
    Verdict,
    verify_block,
    weights_of,
)
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops.graph_timing import events_ms, interleaved

VOCABULARY, REQUESTS, BLOCK, CANDIDATES = 129_280, (1, 8, 64, 256), 7, 64
NO_TOP_K = 1 << 30
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}
CALLS = 3


class Case:
    """One batch of equal requests: logits ``[requests * 7, vocabulary]`` fp32, and its drafts.

    Args:
        filters: ``top_k`` and ``top_p`` of all requests; absent ones are off.
        renorm: FlashInfer's kernels, on CUDA.
    """

    def __init__(
        self,
        requests: int,
        vocabulary: int,
        filters: dict[str, Any],
        device: str,
        renorm: tuple[Callable, Callable] | None = None,
    ) -> None:
        self.requests, self.filters, self.device = requests, filters, device
        self.renorm = renorm
        new = {"device": device}
        self.logits = torch.randn(requests * BLOCK, vocabulary, **new).mul_(3)
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
        # Drafts as good as they get: the target's own candidates, a little off.
        leading = self.logits.view(requests, BLOCK, -1)[:, :-1].topk(min(CANDIDATES, vocabulary))
        self.proposal = propose(
            Candidates(leading.indices, leading.values + torch.randn_like(leading.values)),
            torch.zeros(requests, dtype=torch.int64, **new),
            None,
            self.sampling,
            self.seeds,
            self.positions[:, :-1],
            torch.ones(requests, **new),
        )
        self.draft_temperature = DraftTemperature(device)

    def ours(self, seeded: bool) -> Verdict:
        """A whole verification as a server runs it."""
        own_seed = torch.full((self.requests,), seeded, device=self.device)
        draws = Draws(self.seeds, own_seed, seeded, not seeded, any_greedy=False)
        weights = weights_of(self.logits, self.sampling.repeated(BLOCK), self.renorm)
        verdict = verify_block(
            self.proposal, self.logits, weights, self.sampling, draws, self.positions
        )
        self.draft_temperature.learn(self.proposal, self.sampling, own_seed, verdict)
        return verdict

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

    def contenders(self) -> dict[str, Callable[[], Any]]:
        """Calls by name; SGLang's seeded sampler needs CUDA."""
        calls: dict[str, Callable[[], Any]] = {
            "seeded": lambda: self.ours(True),
            "unseeded": lambda: self.ours(False),
            "sglang": lambda: self.sglang(False),
            "sglang one row": lambda: self.sglang(False, 1),
        }
        if self.device != "cpu":
            calls["sglang seeded"] = lambda: self.sglang(True)
        return calls

    @torch.inference_mode()
    def measure(self, rounds: int) -> dict[str, float]:
        """Median milliseconds a call of every contender; rounds are interleaved."""
        calls = self.contenders()

        def time_ms(name: str) -> float:
            def work() -> None:
                for _ in range(CALLS):
                    calls[name]()

            if self.device != "cpu":
                return events_ms(work) / CALLS
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1000 / CALLS

        times = interleaved(calls, time_ms, rounds)
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
            rows.append({"filters": name, "requests": count, "median_ms": case.measure(rounds)})
            del case
            if device != "cpu":
                torch.cuda.empty_cache()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Median milliseconds, a line for every row."""
    names = list(rows[0]["median_ms"])
    lines = [f"{'filters':<20} {'requests':>8}" + "".join(f"{name:>16}" for name in names)]
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
    from sglang_hyperdflash.serving.verification.verifier import renorm_kernels

    renorm = renorm_kernels()
    rows = run(options.requests, options.vocabulary, options.rounds, "cuda", renorm=renorm)
    results = {"rows": rows, "vocabulary": options.vocabulary, "provenance": provenance()}
    write_json(options.out / "verify.json", results, indent=1)
    print(f"ms of a verification, vocabulary {options.vocabulary}, {BLOCK} rows a request")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
