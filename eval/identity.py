"""Greedy answers against the baseline's: where they first differ, by how much, tie or fault.

Where two answers part, both servers had the same tokens so far. The target is asked how far apart
it holds the two candidates there. A method verifies several positions in one pass, and a pass of
another shape rounds differently; so two candidates closer than the data type can tell apart may
change places (a *tie*). A larger gap cannot come from rounding: a *fault*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from eval.client import Answer, Sampling, chat, messages_before
from eval.errors import one_line
from eval.methods import BASELINE
from eval.runner import DIFFERENCES, Cell, Plan, Servers, is_whole, read_sealed, write_sealed
from sglang_hyperdflash.targets.files import model_dtype
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import key_headers

# The largest gap of two logits that counts as a tie. bf16 keeps 8 bits: between 16 and 32, where
# the largest logits lie, its numbers are 0.125 apart; the hidden states before them round as well.
# TF32 keeps as many bits as fp16.
TIE_GAPS = {"float32": 1e-3, "float16": 0.03, "tf32": 0.03, "bfloat16": 0.25}


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer departs from the baseline's.

    prompt, turn, position: from 0; position in the tokens of the turn's answer. expected, found:
    token ids, None where the answer had ended.
    """

    prompt: int
    turn: int
    position: int
    expected: int | None
    found: int | None


def first_difference(
    prompt: int, expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> Difference | None:
    """The first difference of two answers (token ids of every turn); None when they are equal."""
    for turn, (a, b) in enumerate(zip(expected, found, strict=True)):
        for position in range(max(len(a), len(b))):
            x = a[position] if position < len(a) else None
            y = b[position] if position < len(b) else None
            if x != y:
                return Difference(prompt, turn, position, x, y)
    return None


def differences(baseline: dict[str, Any], unit: dict[str, Any]) -> list[Difference]:
    """First differences of a unit's answers from the baseline's."""
    pairs = zip(baseline["answers"], unit["answers"], strict=True)
    found = (
        first_difference(i, a["output_ids"], b["output_ids"]) for i, (a, b) in enumerate(pairs)
    )
    return [difference for difference in found if difference is not None]


def verdict(gap: float | None, tie_gap: float | None) -> str:
    """``tie``, ``fault``, or ``not measured``."""
    if gap is None or tie_gap is None:
        return "not measured"
    return "tie" if gap <= tie_gap else "fault"


def question(cell: Cell, at: Difference) -> str:
    """What makes one question to the target: the same difference in two rounds is asked once."""
    return f"{cell.folder} {at.prompt} {at.turn} {at.position} {at.expected} {at.found}"


def read_gaps(out: Path) -> dict[str, Any]:
    """What the target answered about first differences, by question."""
    return (read_sealed(out / DIFFERENCES) or {}).get("gaps", {})


def data_type(url: str) -> str:
    """The data type of a server's model, a key of ``TIE_GAPS``.

    ``tf32``: a GPU's attention kernels multiply fp32 with fewer bits.

    Raises:
        requests.RequestException: the server does not answer.
        OSError, KeyError: the config of a model started with ``--dtype auto`` cannot be read.
        HyperDFlashConfigError: the type is another.
    """
    reply = requests.get(f"{url}/server_info", timeout=60, headers=key_headers())
    reply.raise_for_status()
    info, config = reply.json(), {}
    asked = str(info["dtype"])
    if asked == "auto":
        from transformers import PretrainedConfig

        config = PretrainedConfig.get_config_dict(info["model_path"])[0]
    dtype = model_dtype(asked, config)
    return "tf32" if dtype == "float32" and info.get("device", "cpu") != "cpu" else dtype


def judged(
    url: str, dtype: str, turns: list[str], given: Mapping[str, list[Answer]], sampling: Sampling
) -> str:
    """``identical``, ``tie`` or ``fault``: the worst of all greedy answers to one prompt.

    In fp32 every difference is a fault, otherwise what :func:`verdict` does not call a tie.

    Args:
        url, dtype: the baseline's server and its data type. given: the answers of every method;
            each is compared with the baseline's first.

    Raises:
        requests.RequestException, LookupError: as of :func:`logit_gap`.
    """
    baseline = given[BASELINE][0]
    answers = (answer for several in given.values() for answer in several)
    firsts = {first_difference(0, baseline.output_ids, a.output_ids) for a in answers} - {None}
    if not firsts or dtype == "float32":
        return "fault" if firsts else "identical"
    for difference in firsts:
        ended = None in (difference.expected, difference.found)
        gap = None if ended else logit_gap(url, turns, vars(baseline), difference, sampling)
        if verdict(gap, TIE_GAPS[dtype]) != "tie":
            return "fault"
    return "tie"


def logit_gap(
    url: str, turns: list[str], baseline: dict[str, Any], at: Difference, sampling: Sampling
) -> float:
    """How far apart the target holds the two tokens of a difference, in logits.

    Args:
        url: the baseline's server. baseline: its answer.

    Raises:
        requests.RequestException: the server refused or died.
        LookupError: the answer lacks what was asked for.
    """
    messages = messages_before(turns, baseline["texts"], at.turn)
    one = Sampling(0.0, 1, sampling.template_args)
    asked = chat(url, messages, one, return_prompt_token_ids=True)
    prompt = asked["choices"][0]["prompt_token_ids"]
    payload = {
        "input_ids": prompt + baseline["output_ids"][at.turn][: at.position],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [at.expected, at.found],
    }
    options = {"json": payload, "timeout": sampling.timeout, "headers": key_headers()}
    reply = requests.post(f"{url}/generate", **options)
    reply.raise_for_status()
    (values,) = reply.json()["meta_info"]["output_token_ids_logprobs"]
    of = {token: value for value, token, *_ in values}
    # Log-probabilities of one position differ from its logits by one constant.
    return abs(of[at.expected] - of[at.found])


def _found(plan: Plan) -> Iterator[tuple[Cell, dict[str, Any], Difference]]:
    """Every first difference of the run's greedy answers, with the baseline's unit."""

    def units(cell: Cell, method: str) -> list[dict[str, Any]]:
        found = (read_sealed(plan.unit(cell, method, i)) for i in range(plan.rounds))
        return list(filter(is_whole, found))

    for cell in (cell for cell in plan.cells if cell.temperature == 0):
        for baseline in units(cell, BASELINE)[:1]:  # the first whole round, as in the rows
            for method in (m.name for m in plan.methods if m.name != BASELINE):
                for unit in units(cell, method):
                    for difference in differences(baseline, unit):
                        yield cell, baseline, difference


def measure_gaps(plan: Plan, servers: Servers) -> str | None:
    """Ask the target for the gap at every first difference that was not asked before.

    Returns:
        Why gaps are missing, or None.
    """
    todo = {
        question(cell, difference): (cell, baseline, difference)
        for cell, baseline, difference in _found(plan)
        if None not in (difference.expected, difference.found)
    }
    gaps = read_gaps(plan.out)
    method = next(m for m in plan.methods if m.name == BASELINE)
    dtype = ""
    for name in (name for name in todo if name not in gaps):
        cell, baseline, difference = todo[name]
        turns = plan.prompts[cell.benchmark][difference.prompt]
        answer = baseline["answers"][difference.prompt]
        try:
            url = servers.url(method)
            dtype = dtype or data_type(url)
            gap = logit_gap(url, turns, answer, difference, plan.sampling(cell))
        except (requests.RequestException, ServerFailed, OSError, LookupError, ValueError) as error:
            return f"{type(error).__name__}: {one_line(error)}"[:300]
        gaps[name] = {"gap": gap, "dtype": dtype, "tie_gap": TIE_GAPS[dtype]}
        write_sealed(plan.out / DIFFERENCES, {"gaps": gaps})
    return None
