"""The server against transformers' own DeepSeek-V4: logits, and the residual that is drafted from.

Every row is one that a round of speculation committed, or a prefill.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.v4.conftest import Reference
from tests.engine.v4.findings import note
from tests.engine.v4.golden import Golden, Transformers, logit_error, medians, path_error
from tests.engine.v4.serve import known
from tests.engine.v4.served import PATHS, Served, serve_text

pytestmark = pytest.mark.v4
DECODED = 64
# The server's distance from fp32 with V4's own rounding of K/V, in distances of bf16's.
ALLOWED = 1.25


@pytest.fixture(scope="module")
def served(servers, target, drafter, reference: Reference, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("v4-golden")
    prompt, answer = next(
        pair
        for pair in zip(reference.prompts, reference.answers, strict=True)
        if len(pair[0]) == 300
    )
    environment = known(folder, [prompt], [answer])
    found = serve_text(servers, "golden", target, drafter, prompt, DECODED, folder, **environment)
    assert found.answer == answer
    assert found.accepted > DECODED // 2
    return found


@pytest.fixture(scope="module")
def models(target) -> dict[str, Transformers]:
    return {
        "fp32": Transformers(target, torch.float32),
        "fp32, fp8 K/V": Transformers(target, torch.float32, fp8_cache=True),
        "bf16, fp8 K/V": Transformers(target, torch.bfloat16, fp8_cache=True),
    }


@pytest.fixture(scope="module")
def goldens(models, served: Served) -> dict[str, Golden]:
    return {name: model.run(served.tokens, DECODED) for name, model in models.items()}


def test_logits_are_as_far_from_transformers_as_fp8_and_bf16_explain(served, goldens, target):
    exact, rounded, bf16 = (goldens[name].logits for name in goldens)
    prompt = len(served.prompt)
    report = {
        "server to fp32": medians(logit_error(served.logprobs, exact), prompt),
        "fp8 K/V to fp32": medians(logit_error(rounded, exact), prompt),
        "server to fp8 K/V": medians(logit_error(served.logprobs, rounded), prompt),
        "bf16, fp8 K/V to fp8 K/V": medians(logit_error(bf16, rounded), prompt),
    }
    note("golden: log-probabilities, root mean square, prefill and decoded", **report)
    for ours, allowed in (
        ("server to fp32", "fp8 K/V to fp32"),
        ("server to fp8 K/V", "bf16, fp8 K/V to fp8 K/V"),
    ):
        for found, bound in zip(report[ours], report[allowed], strict=True):
            assert found <= ALLOWED * bound, (ours, report)


def test_the_residual_is_transformers_streams_path_by_path(served, goldens):
    exact, rounded, bf16 = (goldens[name].residual for name in goldens)
    prompt = len(served.prompt)
    allowed = path_error(bf16, rounded)
    found = path_error(served.residual, rounded)
    for i in range(PATHS):
        ours, bound = medians(found[:, i], prompt), medians(allowed[:, i], prompt)
        note(f"golden: residual of path {i}", distance=ours, of_bf16=bound)
        assert all(a <= ALLOWED * b for a, b in zip(ours, bound, strict=True)), i
        for other in set(range(PATHS)) - {i}:
            crossed = path_error(served.residual[:, i : i + 1], exact[:, other : other + 1])
            assert float(crossed.median()) > 2 * max(ours), "paths could be in any order"


def without_sinks(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)


def without_window_biases(model) -> None:
    for name, value in model.named_parameters():
        if name.endswith("position_bias"):
            value.data.zero_()


def without_clamps(model) -> None:
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = 1e4


def mixing_the_other_way(model) -> None:
    for layer in model.model.layers:
        for name in ("attn_hc", "ffn_hc"):
            own = getattr(layer, name).forward

            def transposed(streams, own=own):
                post, comb, collapsed = own(streams)
                return post, comb.transpose(-1, -2), collapsed

            getattr(layer, name).forward = transposed


def one_rope(model) -> None:
    rope = model.model.rotary_emb
    rope.compress_inv_freq.copy_(rope.main_inv_freq)


@pytest.mark.parametrize(
    "fault",
    [without_sinks, without_window_biases, without_clamps, mixing_the_other_way, one_rope],
)
def test_a_wrong_formula_is_farther_away(served, goldens, target, fault):
    """The bound is tight enough to see each of these, none of which is a large change."""
    wrong = Transformers(target, torch.float32, fp8_cache=True)
    fault(wrong.model)
    found = wrong.run(served.tokens, DECODED).logits
    prompt = len(served.prompt)
    rounded, bf16 = goldens["fp32, fp8 K/V"].logits, goldens["bf16, fp8 K/V"].logits
    bound = medians(logit_error(bf16, rounded), prompt)
    ours = medians(logit_error(served.logprobs, found), prompt)
    note(f"golden, control: {fault.__name__}", distance=ours, of_bf16=bound)
    assert max(a / b for a, b in zip(ours, bound, strict=True)) > ALLOWED


def test_the_first_token_is_transformers_as_often_as_bf16s(served, goldens):
    """The first token is transformers' own as often as bf16 and fp8 leave it there."""
    exact, _, bf16 = (goldens[name].logits.argmax(-1) for name in goldens)
    found = served.logprobs.argmax(-1)
    same, bound = ((exact == x).float().mean() for x in (found, bf16))
    note("golden: same first token", server=float(same), bf16=float(bound))
    assert same > bound - 0.05


def test_no_tensor_of_the_checkpoint_was_left_unread(served):
    assert "not found in params_dict" not in served.log
    assert "not initialized from checkpoints" not in served.log
