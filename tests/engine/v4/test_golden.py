"""The server against transformers' own DeepSeek-V4: logits, and the residual that is drafted from.

Every row is one that a round of speculation committed, or a prefill.
"""

import pytest
import torch

from tests.engine.v4.conftest import LENGTHS, Texts
from tests.engine.v4.findings import note
from tests.engine.v4.golden import FIELDS, WEIGHTS, changed, logit_error, transformers
from tests.engine.v4.serve import known, prompts
from tests.engine.v4.served import ALLOWED, ANSWER, DECODED, Text, serve_text, within

pytestmark = pytest.mark.v4
TURNED = "index turned round"
FAULTS = [fault for fault in (*WEIGHTS, *FIELDS) if fault != TURNED]
# The top 512 of up to 716 rows of four tokens: the index really selects, in the last rows most.
LONG, LAST = 2800, 200


@pytest.fixture(scope="module")
def text(servers, target, drafter, texts: Texts, tmp_path_factory) -> Text:
    folder = tmp_path_factory.mktemp("v4-golden")
    prompt, answer = (part[LENGTHS.index(300)] for part in texts.asked["first"])
    environment = known(folder, [prompt], [answer[:ANSWER]])
    text = serve_text(servers, "golden", target, drafter, prompt, folder, **environment)
    assert text.answer == answer[:ANSWER]
    assert text.accepted > DECODED // 2
    return text


def test_server_is_as_far_from_transformers_as_rounding_explains(text: Text, target):
    exact = transformers(target, torch.float32, text.tokens, DECODED, fp8_cache=False)
    near, bound = text.explained(text.exact.logits)
    report = {
        "server to fp32": text.medians(logit_error, text.logprobs, exact.logits),
        "fp8 K/V to fp32": text.medians(logit_error, text.exact.logits, exact.logits),
        "server to fp8 K/V": near,
        "bf16, fp8 K/V to fp8 K/V": bound,
    }
    note("golden: log-probabilities, root mean square, prefill and decoded", **report)
    assert within(near, bound)
    assert within(report["server to fp32"], report["fp8 K/V to fp32"])
    text.assert_paths(text.exact.residual, "golden")
    first = exact.logits.argmax(-1)
    same, bf16 = ((first == x.argmax(-1)).float().mean() for x in (text.logprobs, text.bf16.logits))
    note("golden: same first token", server=float(same), bf16=float(bf16))
    assert same > bf16 - 0.05
    for unread in ("not found in params_dict", "not initialized from checkpoints"):
        assert unread not in text.log


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_formula_is_farther_away(text: Text, target, tmp_path, fault):
    """The bound is tight enough to see each of these, none of which is a large change."""
    wrong = changed(target, fault, tmp_path / "wrong")
    logits = transformers(wrong, torch.float32, text.tokens, DECODED).logits
    distance, bound = text.explained(logits)
    note(f"golden, control: {fault}", distance=distance, of_bf16=bound)
    assert max(a / b for a, b in zip(distance, bound, strict=True)) > ALLOWED


def test_the_index_selects_what_transformers_selects(servers, target, drafter, tmp_path):
    """A text so long that ratio 4 attends to the index's choice alone; turned round it is wrong."""
    (prompt,) = prompts(LONG)
    text = serve_text(servers, "long", target, drafter, prompt, tmp_path, LONG - LAST)
    turned = changed(target, TURNED, tmp_path / "turned")
    logits = transformers(turned, torch.float32, text.tokens, DECODED).logits
    (near, bound), (far, _) = map(text.explained, (text.exact.logits, logits))
    note(f"golden: {LONG} tokens, the index selects", right=near, wrong=far, of_bf16=bound)
    assert within(near, bound) and not within(far, bound)
