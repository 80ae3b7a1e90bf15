"""Greedy answers against the baseline's: where they first differ, by how much, tie or fault.

Where two answers first differ, both servers had the same tokens so far. The target is asked how far
apart it holds the two candidates there. A method verifies several positions in one pass, and a pass
of another shape rounds differently, so two candidates that are closer than the data type can tell
apart may change places: a *tie*. Rounding cannot explain a larger gap: a *fault*.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import requests

from eval.client import Answer, Sampling, chat, messages_before, post
from eval.errors import one_line
from eval.methods import BASELINE
from eval.runner import Cell, Plan, Servers, Unit, is_whole, read_sealed, read_units, write_sealed
from sglang_hyperdflash.targets.files import model_dtype
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import key_headers

DIFFERENCES = "differences.json"
# The largest gap of two logits that counts as a tie. bf16 keeps 8 bits: between 16 and 32, where
# the largest logits lie, its numbers are 0.125 apart; the hidden states before them round as well.
# TF32 keeps as many bits as fp16.
TIE_GAPS = {"float32": 1e-3, "float16": 0.03, "tf32": 0.03, "bfloat16": 0.25}


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer departs from the baseline's; indices count from 0."""

    prompt: int
    turn: int
    position: int  # in the tokens of the turn's answer
    expected: int | None  # the baseline's token id; None: its answer had ended
    found: int | None  # likewise of the compared answer


def first_difference(
    prompt: int, expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> Difference | None:
    """The first difference of two answers (token ids of every turn); None when they are equal."""
    for turn, answers in enumerate(zip(expected, found, strict=True)):
        for position, (baseline_id, token_id) in enumerate(zip_longest(*answers)):
            if baseline_id != token_id:
                return Difference(prompt, turn, position, baseline_id, token_id)
    return None


def differences(baseline: Unit, unit: Unit) -> list[Difference]:
    """First differences of a unit's answers from the baseline's."""
    pairs = enumerate(zip(baseline["answers"], unit["answers"], strict=True))
    firsts = (first_difference(i, a["output_ids"], b["output_ids"]) for i, (a, b) in pairs)
    return [difference for difference in firsts if difference is not None]


def verdict(gap: float | None, tie_gap: float | None) -> str:
    """``tie``, ``fault``, or ``not measured``."""
    if gap is None or tie_gap is None:
        return "not measured"
    return "tie" if gap <= tie_gap else "fault"


def question(cell: Cell, difference: Difference) -> str:
    """The key of a measured gap: a difference that several rounds repeat is asked once."""
    return " ".join(map(str, (cell.folder, *astuple(difference))))


def read_gaps(out: Path) -> dict[str, Any]:
    """What the target answered about first differences, by question."""
    return (read_sealed(out / DIFFERENCES) or {}).get("gaps", {})


def data_type(url: str) -> str:
    """The data type of a server's model, a key of ``TIE_GAPS``.

    It is ``tf32`` for fp32 on a GPU, whose attention kernels multiply with fewer bits. Raises
    ``RequestException`` without an answer, ``OSError`` or ``KeyError`` where the config of a model
    started with ``--dtype auto`` cannot be read, ``HyperDFlashConfigError`` for another type.
    """
    reply = requests.get(f"{url}/server_info", timeout=60, headers=key_headers())
    reply.raise_for_status()
    info, config = reply.json(), {}
    if info["dtype"] == "auto":
        from transformers import PretrainedConfig

        config = PretrainedConfig.get_config_dict(info["model_path"])[0]
    dtype = model_dtype(str(info["dtype"]), config)
    return "tf32" if dtype == "float32" and info.get("device", "cpu") != "cpu" else dtype


def judged(
    url: str, dtype: str, turns: list[str], answers: Mapping[str, list[Answer]], sampling: Sampling
) -> str:
    """``identical``, ``tie`` or ``fault``: the worst of all greedy answers to one prompt.

    Every answer (``answers`` holds them by method) is compared with the baseline's first. In fp32
    every difference is a fault, otherwise what :func:`verdict` does not call a tie. ``url`` and
    ``dtype`` are those of the baseline's server. Raises as :func:`logit_gap`.
    """
    baseline = answers[BASELINE][0]
    all_ids = [answer.output_ids for answer in chain.from_iterable(answers.values())]
    firsts = {first_difference(0, baseline.output_ids, ids) for ids in all_ids} - {None}
    if not firsts or dtype == "float32":
        return "fault" if firsts else "identical"
    for difference in firsts:
        ended = None in (difference.expected, difference.found)
        gap = None if ended else logit_gap(url, turns, vars(baseline), difference, sampling)
        if verdict(gap, TIE_GAPS[dtype]) != "tie":
            return "fault"
    return "tie"


def logit_gap(
    url: str, turns: list[str], answer: dict[str, Any], difference: Difference, sampling: Sampling
) -> float:
    """How far apart the target holds the two tokens of a difference, in logits.

    ``url`` is the baseline's server and ``answer`` its answer, with the fields of
    ``client.Answer``. Raises ``RequestException`` where the server refused or died, and
    ``LookupError`` where its reply lacks a field.
    """
    messages = messages_before(turns, answer["texts"], difference.turn)
    one_token = Sampling(0.0, 1, sampling.template_args)
    completion = chat(url, messages, one_token, return_prompt_token_ids=True)
    prompt_ids = completion["choices"][0]["prompt_token_ids"]
    payload = {
        "input_ids": prompt_ids + answer["output_ids"][difference.turn][: difference.position],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [difference.expected, difference.found],
    }
    reply = post(f"{url}/generate", payload)
    reply.raise_for_status()
    (values,) = reply.json()["meta_info"]["output_token_ids_logprobs"]
    logprobs = {token_id: logprob for logprob, token_id, *_ in values}
    # Log-probabilities of one position differ from its logits by one constant.
    return abs(logprobs[difference.expected] - logprobs[difference.found])


def _first_differences(plan: Plan) -> Iterator[tuple[Cell, Unit, Difference]]:
    """Every first difference of the run's greedy answers, with the baseline's unit."""
    for cell in (cell for cell in plan.cells if cell.temperature == 0):
        baseline_units = read_units(plan.out, cell, BASELINE, plan.rounds)
        baseline = next(filter(is_whole, baseline_units), None)  # as in the rows
        if baseline is None:
            continue
        for name in (method.name for method in plan.methods if method.name != BASELINE):
            for unit in filter(is_whole, read_units(plan.out, cell, name, plan.rounds)):
                yield from ((cell, baseline, d) for d in differences(baseline, unit))


def measure_gaps(plan: Plan, servers: Servers) -> str | None:
    """Ask the target for the gaps that were not measured yet; return why some are missing."""
    gaps, dtype = read_gaps(plan.out), ""
    method = next(method for method in plan.methods if method.name == BASELINE)
    for cell, baseline, difference in _first_differences(plan):
        name = question(cell, difference)
        if name in gaps or None in (difference.expected, difference.found):
            continue
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
