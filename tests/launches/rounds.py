"""The rounds that are counted, and their budgets.

A round is what runs outside CUDA graphs between the drafter's pass and the commit: drafting, the
final logits, verification, the new lengths. What comes before and after has rows of its
own. A budget is a count, its bytes rounded up to three digits.
"""

from functools import cache
from pathlib import Path
from typing import Any

from sglang.srt.sampling.sampling_params import TOP_K_ALL

from tests.launches.counter import Counter, FakeCuda
from tests.launches.server import ROUND, FakeServer

TABLE = Path(__file__).with_name("budgets.toml")
REQUESTS = (1, 64)

GREEDY: dict[str, Any] = {}
SAMPLED = {"top_k": TOP_K_ALL}
SEEDED = SAMPLED | {"sampling_seed": 3}
TOP_K, TOP_P = {"top_k": 50}, {"top_p": 0.9, "min_p": 0.05}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
MIN_TOKENS, BIAS = {"min_new_tokens": 200}, {"logit_bias": {"5": 1.0}}
CHANGES = PENALTIES | MIN_TOKENS | BIAS
EVERYTHING = PENALTIES, SAMPLED | TOP_P, SEEDED | TOP_K | MIN_TOKENS, BIAS
NO_HEAD, NARROW, RANKS = {"head": False}, {"width": 1}, {"ranks": 2}
# Requests of a batch in turn, options of ``FakeServer``.
ROUNDS: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "greedy": ((GREEDY,), NO_HEAD),
    "greedy, head": ((GREEDY,), {}),
    "greedy, head, no copies": ((GREEDY,), {"copied": False}),
    "greedy, head, penalties": ((PENALTIES,), {}),
    "greedy, head, width 1": ((GREEDY,), NARROW),
    "greedy, head, 2 ranks": ((GREEDY,), RANKS),
    "greedy, head, 2 ranks, sharded logits": ((GREEDY,), RANKS | {"sharded": True}),
    "sampled": ((SAMPLED,), NO_HEAD),
    "sampled, head": ((SAMPLED,), {}),
    "sampled, head, no copies": ((SAMPLED,), {"copied": False}),
    "sampled, head, top-k": ((SAMPLED | TOP_K,), {}),
    "sampled, head, top-p, min-p": ((SAMPLED | TOP_P,), {}),
    "sampled, head, top-k, top-p, min-p": ((SAMPLED | TOP_K | TOP_P,), {}),
    "sampled, head, penalties": ((SAMPLED | PENALTIES,), {}),
    "sampled, head, min tokens": ((SAMPLED | MIN_TOKENS,), {}),
    "sampled, head, bias": ((SAMPLED | BIAS,), {}),
    "sampled, head, penalties, min tokens, bias": ((SAMPLED | CHANGES,), {}),
    "sampled, head, width 1": ((SAMPLED,), NARROW),
    "sampled, head, window": ((SAMPLED,), {"window": True}),
    "sampled, head, no graph": ((SAMPLED,), {"graph": False}),
    "sampled, head, 2 ranks": ((SAMPLED,), RANKS),
    "sampled, head, recorded": ((SAMPLED,), {"recorded": True}),
    "seeded, head": ((SEEDED,), {}),
    "seeded, head, top-k": ((SEEDED | TOP_K,), {}),
    "seeded, head, penalties, min tokens, bias": ((SEEDED | CHANGES,), {}),
    "mixed, head": ((GREEDY, SAMPLED, SEEDED), {}),
    "mixed, head, everything": (EVERYTHING, {}),
    "mixed, head, everything, width 2": (EVERYTHING, {"width": 2}),
}
# Of each row of the budgets: the phases that count, and the round in which they are counted.
ROWS = {name: (ROUND, name) for name in ROUNDS} | {
    "a new batch": (("new batch",), "sampled, head"),
    "a new batch, penalties": (("new batch",), "sampled, head, penalties"),
    "the block": (("block",), "sampled, head"),
    "the draft's input": (("draft input",), "sampled, head"),
    "candidates in the draft's graph": (("draft graph",), "greedy, head"),
    "a window's table": (("window",), "sampled, head, window"),
    "draft K/V": (("draft K/V",), "sampled, head"),
    "draft K/V, window": (("draft K/V",), "sampled, head, window"),
    "recording one request in 20": (("recording",), "sampled, head, recorded"),
    "copies": (("copies",), "sampled, head"),
    "copies of a new batch": (("copies of a new batch",), "sampled, head"),
    "counting for penalties": (("counting",), "sampled, head, penalties"),
    "a prefill's token": (("prefill",), "sampled, head"),
    "a prefill's token, everything": (("prefill",), "mixed, head, everything"),
}


@cache
def counted(name: str, bs: int) -> Counter:
    requests, options = ROUNDS[name]
    with FakeCuda() as cuda:
        return FakeServer(cuda, bs, requests, **options).round()
