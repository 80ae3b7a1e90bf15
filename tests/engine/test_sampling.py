"""Temperature > 0: tokens emitted by the engine follow the target's exact distribution.

Every context ends where the target is nearly certain of one token, the same anchor of almost every
draw. The two tokens after it come from verification alone, of a block's first two rows.
"""

from itertools import islice

import pytest
import torch

from sglang_hyperdflash.serving.settings import COPY, FULL, WIDTH
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine.conftest import FP32
from tests.target_probabilities import target_probabilities
from tests.unit.statistics_help import chi_square_p_value

pytestmark = pytest.mark.xdist_group("pair")
SETTINGS = {
    "temperature 1": {},
    "top-k 5": {"top_k": 5},
    "top-p 0.8": {"top_p": 0.8},
    "min-p 0.1": {"min_p": 0.1},
}
CONTEXTS_EACH, DRAWS, FEW = 5, 1000, 300
# Answers are sure of themselves; the target is open now and then after their end.
CERTAIN, CONTEXTS_A_ROW = 0.9, 2


def distribution(logits: torch.Tensor, setting: dict) -> torch.Tensor:
    rows = torch.ones(len(logits))
    filters = [(setting[n] * rows if n in setting else None) for n in ("top_k", "top_p", "min_p")]
    return target_probabilities(logits, rows, *filters)


class Contexts:
    """Contexts with a near-certain next token, and the distributions of the two tokens after it."""

    def __init__(self, target: LocalTarget, rows: list[list[int]]) -> None:
        self.target = target
        self.found: list[tuple[list[int], int]] = []
        for row in rows:
            top = self.logits([row])[0].softmax(-1).max(-1)
            sure, likeliest = top.values.tolist(), top.indices.tolist()
            # The token after the certain one must be open, or the test says nothing.
            fit = (
                (row[: end + 1], row[end + 1])
                for end in range(24, len(row) - 1)
                if sure[end] > CERTAIN and sure[end + 1] < 0.6 and likeliest[end] == row[end + 1]
            )
            self.found += islice(fit, CONTEXTS_A_ROW)

    def logits(self, rows: list[list[int]]) -> torch.Tensor:
        return self.target.lm_head(self.target.features(torch.tensor(rows))[0])

    def distributions(self, index: int, setting: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """``p(t2 | context, anchor)`` ``[V]`` and ``p(t3 | context, anchor, t2)`` ``[V, V]``."""
        context, anchor = self.found[index]
        first = distribution(self.logits([[*context, anchor]])[0, -1:], setting)[0]
        second = torch.zeros(len(first), len(first))
        for token in (first > 1e-3).nonzero().flatten().split(64):
            rows = [[*context, anchor, int(t)] for t in token]
            second[token] = distribution(self.logits(rows)[:, -1], setting)
        return first, second


@pytest.fixture(scope="module")
def contexts(target_dir, own_prompts, baseline) -> Contexts:
    rows = [p + r for p, r in zip(own_prompts, baseline["long"], strict=True)]
    # Later windows of the same answers give further contexts.
    rows += [row[-110:] for row in rows] + [row[10:140] for row in rows]
    found = Contexts(LocalTarget(target_dir), rows)
    assert len(found.found) >= len(SETTINGS) * CONTEXTS_EACH, len(found.found)
    return found


def p_values(contexts: Contexts, server: Server, index: int, setting: dict, count: int):
    """Next-token and next-two-token p-values at one context."""
    context, anchor = contexts.found[index]
    first, second = contexts.distributions(index, setting)
    sampling = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True, **setting}
    answers = server.generate(input_ids=[context] * count, sampling_params=sampling)
    tokens = torch.tensor([answer["output_ids"] for answer in answers])
    tokens = tokens[tokens[:, 0] == anchor]
    assert len(tokens) > 0.6 * count
    joint = (first.unsqueeze(1) * second).flatten()
    # First tokens too rare to have their own row of distributions form one extra cell.
    rest = first[second.sum(1) == 0].sum().reshape(1)
    cells = tokens[:, 1] * len(first) + tokens[:, 2]
    cells = torch.where(second.sum(1)[tokens[:, 1]] == 0, len(joint), cells)
    return [
        chi_square_p_value(tokens[:, 1], first),
        chi_square_p_value(cells, torch.cat([joint, rest])),
    ]


def assert_the_distribution_holds(
    contexts: Contexts, server: Server, each: int, count: int = DRAWS
) -> None:
    """At every setting, at ``each`` contexts of its own."""
    tests = {
        (name, c): p_values(contexts, server, s * CONTEXTS_EACH + c, setting, count)
        for s, (name, setting) in enumerate(SETTINGS.items())
        for c in range(each)
    }
    assert min(map(min, tests.values())) > 0.001 / (2 * len(tests)), tests


@pytest.mark.parametrize(
    ("each", "count"), [(1, FEW), pytest.param(CONTEXTS_EACH, DRAWS, marks=pytest.mark.slow)]
)
def test_engine_draws_follow_the_targets_distribution(hyper_server, contexts, each, count):
    assert_the_distribution_holds(contexts, hyper_server, each, count)


@pytest.mark.slow
def test_a_greedy_request_drafts_with_its_bias_whoever_is_next_to_it(
    servers, target_dir, drafter_dir, own_prompts
):
    """The bias forbids what it would say; drafts of that are refused.

    Copies would follow earlier requests' luck, and so would the rounds.
    """
    arguments = (*FP32, "--random-seed", "7", *hyperdflash_arguments(drafter_dir))
    server = servers.get("biased", target_dir, *arguments, environment={WIDTH: FULL, COPY: "0"})
    greedy = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    biased = greedy | {"logit_bias": dict.fromkeys(("1", "20", "22", "225"), -100.0)}
    sampled = greedy | {"temperature": 1, "max_new_tokens": 96}

    def rounds(prompt: list[int], *sampling: dict) -> tuple[list[int], list[int]]:
        """Tokens of the first request of a batch, and its rounds by accepted drafts."""
        prompts = [prompt, *own_prompts[-1:]][: len(sampling)]
        answer = server.generate(input_ids=prompts, sampling_params=list(sampling))[0]
        return answer["output_ids"], answer["meta_info"]["spec_correct_drafts_histogram"]

    alone = [rounds(prompt, biased) for prompt in own_prompts[:3]]
    plain = [rounds(prompt, greedy) for prompt in own_prompts[:3]]
    assert not any(a[0] == b[0] for a, b in zip(alone, plain, strict=True))
    assert alone == [rounds(prompt, biased, sampled) for prompt in own_prompts[:3]]
    servers.stop("biased")
