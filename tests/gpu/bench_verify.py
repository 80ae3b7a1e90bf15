"""Milliseconds of a sampled round outside the models, on one GPU; part of ``make bench``.

Rows are a verified round's, seven a request. ``seeded`` and ``unseeded`` go from logits to what is
committed, and the learning. Rivals: SGLang's walk of a dependency head's candidates (``selector``,
of ``propose``; in its draft's graph while serving, so its time is an upper bound), torch's softmax,
and SGLang's sampler, on as many rows or on one a request. Launches count: there is no CUDA graph.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, Proposal, propose
from sglang_hyperdflash.serving.verification import exact
from sglang_hyperdflash.serving.verification.verifier import renorm_kernels
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops.graph_timing import events_ms, interleaved

VOCABULARY, REQUESTS, BLOCK, CANDIDATES, RANK = 129_280, (1, 8, 64, 256), 7, 64, 256
FILTERS = {"none": {}, "top-p 0.9": {"top_p": 0.9}}
FILTERS["top-k 50, top-p 0.9"] = {"top_k": 50, "top_p": 0.9}


class Case:
    """One batch of equal requests: logits ``[requests * 7, vocabulary]`` fp32, and its drafts."""

    def __init__(self, requests: int, filters: dict) -> None:
        self.requests, self.filters, self.renorm = requests, filters, renorm_kernels()
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.logits = torch.randn(requests * BLOCK, VOCABULARY).mul_(3)
            # Drafts as good as they get: the target's own candidates, a little off.
            leading = self.logits.view(requests, BLOCK, -1)[:, :-1].topk(CANDIDATES)
            scores = leading.values + torch.randn_like(leading.values)
            gates = torch.randn(requests, BLOCK - 1, RANK)
            self.candidates = Candidates(leading.indices, scores, gates)
            head = DependencyHead(VOCABULARY, 8, RANK, "residual").requires_grad_(False)
            head.successor.normal_()  # a new head adds nothing
            self.head = head.bfloat16()
            self.seeds = torch.randint(0, 1 << 60, (requests,))
            ones = torch.ones(requests)
            top_ks = torch.full_like(ones, filters.get("top_k", 1 << 30), dtype=torch.int32)
            limits = top_ks, ones * filters.get("top_p", 1.0), 0 * ones
            self.sampling = Sampling(ones, *limits, "top_k" in filters, "top_p" in filters)
            self.positions = torch.arange(BLOCK).repeat(requests, 1) + 100
            self.anchors = torch.zeros(requests, 1, dtype=torch.int64)
        self.proposal = self.propose(self.draws(False))
        self.block = torch.cat([self.anchors, self.proposal.tokens], 1)

    def draws(self, seeded: bool) -> Draws:
        return Draws(self.seeds, torch.full_like(self.seeds, seeded).bool(), not seeded)

    def propose(self, draws: Draws) -> Proposal:
        drafting = self.anchors, self.positions, self.sampling, draws
        return propose(self.candidates, self.head, *drafting, 0.5)

    def rows(self, draws: Draws) -> exact.Rows:
        kept = None
        if self.filters:
            by_block = self.logits.view(self.requests, BLOCK, -1)
            kept = exact.weights_of(by_block, self.sampling, self.renorm).flatten(0, 1)
        return exact.read_rows(
            self.logits, kept, self.sampling, draws, self.positions, all_draw=False
        )

    def committed(self, rows: exact.Rows, draws: Draws) -> exact.Committed:
        given = self.block, self.positions, self.proposal, self.sampling, draws
        return exact.unpack(exact.verify_block(rows, *given, VOCABULARY), self.requests, BLOCK)

    def ours(self, seeded: bool) -> None:
        """A whole verification as a server runs it."""
        draws = self.draws(seeded)
        self.committed(self.rows(draws), draws)

    def selector(self) -> Callable:
        """SGLang's selector on the same candidates, its projection already applied."""
        from sglang.srt.models.dflash import CandidateSelector

        ids, uniforms = self.candidates.ids, torch.rand_like(self.candidates.scores[..., 0])
        selector = CandidateSelector(hidden_size=1, vocab_size=1, state_rank=1, top_k=ids.shape[2])
        selector.predecessor_codebook = self.head.predecessor
        selector.successor_codebook = self.head.successor
        selector.hidden_projection = torch.nn.Identity()
        lattice = {"candidate_ids": ids, "unary_logits": self.candidates.scores}
        lattice["hidden_states"] = self.candidates.gates.bfloat16()
        lattice["anchor_token_ids"] = self.anchors[:, 0]
        path = {"candidate_ids": ids, "temperatures": self.sampling.temperatures}
        path["greedy_mask"] = torch.zeros_like(self.seeds).bool()

        def walk() -> torch.Tensor:
            scores = selector.build_lattice(**lattice)
            return selector.sample_path(scores=scores, uniforms=torch.rand_like(uniforms), **path)

        return walk

    def sglang(self, seeded: bool, each: int = BLOCK) -> torch.Tensor:
        """SGLang's ``Sampler._sample_from_probs``: ``each`` rows of every request."""
        from sglang.srt.layers import sampler

        sampling, rows = self.sampling.repeated(each), self.requests * each
        probs = torch.softmax(self.logits[:rows] / sampling.temperatures.unsqueeze(-1), dim=-1)
        noise = self.seeds.repeat_interleave(each) if seeded else None
        noise = noise, self.positions.reshape(-1)[:rows]
        if not self.filters:
            return sampler.sampling_from_probs_torch(probs, *noise)
        limits = probs, sampling.top_ks, sampling.top_ps
        if not seeded:
            return sampler.top_k_top_p_sampling_from_probs(*limits, filter_apply_order="joint")
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            *limits, sampling.min_ps, False, *noise
        )

    def measure(self) -> dict[str, float]:
        """Median milliseconds a call of every contender; rounds are interleaved."""
        draws, rows = self.draws(False), self.rows(self.draws(False))
        calls = {
            "propose": partial(self.propose, draws),
            "selector": self.selector(),
            "rows": partial(self.rows, draws),
            "rows seeded": partial(self.rows, self.draws(True)),
            "softmax": partial(torch.softmax, self.logits, dim=-1),
            "accept and finish": partial(self.committed, rows, draws),
            "seeded": partial(self.ours, True),
            "unseeded": partial(self.ours, False),
            "sglang": partial(self.sglang, False),
            "sglang one row": partial(self.sglang, False, 1),
            "sglang seeded": partial(self.sglang, True),
        }

        def time_ms(name: str) -> float:
            return events_ms(lambda: [calls[name]() for _ in range(3)]) / 3

        times = interleaved(calls, time_ms, rounds=20)
        return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("bench_verify needs a CUDA device; torch found none")
    rows = []
    for name, filters in FILTERS.items():
        for count in REQUESTS:
            median_ms = Case(count, filters).measure()
            rows.append({"filters": name, "requests": count, "median_ms": median_ms})
            print(rows[-1])
            torch.cuda.empty_cache()
    results = {"rows": rows, "vocabulary": VOCABULARY, "provenance": provenance()}
    write_json(out / "verify.json", results, indent=1)


if __name__ == "__main__":
    main()
