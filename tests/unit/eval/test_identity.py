"""Greedy answers against the baseline's: where they part, and whether that is a tie or a fault."""

import pytest

from eval.identity import TIE_GAPS, Difference, data_type, first_difference, verdict
from tests.unit.eval.fake_server import rows_of, run_command


def test_first_differences_are_of_any_turn_and_of_ends():
    assert first_difference(0, [[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference(4, [[1, 2], [3, 4]], [[1, 2], [3, 5]]) == Difference(4, 1, 1, 4, 5)
    assert first_difference(0, [[1, 2]], [[1]]) == Difference(0, 0, 1, 2, None)


@pytest.mark.parametrize(
    "dtype, device, counted, tie, fault",
    [
        ("bfloat16", "cuda", "bfloat16", 0.25, 0.26),
        ("float32", "cpu", "float32", 0.001, 0.02),
        # Attention on a GPU multiplies fp32 as TF32.
        ("float32", "cuda", "tf32", 0.02, 0.2),
    ],
)
def test_a_gap_is_judged_by_the_types_that_the_target_computes_in(
    fake, dtype, device, counted, tie, fault
):
    assert data_type(fake(4, [], dtype=dtype, device=device).url) == counted
    bound = TIE_GAPS[counted]
    assert (verdict(tie, bound), verdict(fault, bound)) == ("tie", "fault")
    assert verdict(None, bound) == "not measured"


@pytest.mark.parametrize("gap, ties, faults", [(0.2, 2, 0), (0.5, 0, 2)])
def test_a_first_difference_is_asked_once_with_the_tokens_before_it(
    data, tmp_path, fake, gap, ties, faults
):
    def parting(text: str) -> list[int]:  # at the third token of one prompt's first turn
        return [len(text), len(text), 90 if text == "qqqqq" else len(text), len(text)]

    target, ours, out = fake(4, []), fake(parting, [1, 1]), tmp_path / "out"
    report = out / "report.md"
    assert run_command(data, out, target, ours) == 0  # the target gives no log probabilities
    assert "| HyperDFlash (6) | 6 | 4 | 0 | 0 | 2 | - |" in report.read_text()
    target.logits = {5: 20.0, 90: 20.0 - gap}
    target.generated.clear()
    for _ in range(2):
        assert run_command(data, out, target, ours) == 0
        # The same difference in both rounds is one question.
        (asked,) = target.generated
        assert asked["input_ids"] == [5, 5, 5] and asked["token_ids_logprob"] == [5, 90]
    row = rows_of(out)["hyperdflash6"]
    assert (row["identical_answers"], row["compared_answers"]) == (4, 6)
    entry = row["differences"][0]
    assert (entry["prompt"], entry["turn"], entry["position"]) == (1, 0, 2)
    assert (entry["expected"], entry["found"], entry["dtype"]) == (5, 90, "bfloat16")
    assert entry["gap"] == pytest.approx(gap)
    assert f"| HyperDFlash (6) | 6 | 4 | {ties} | {faults} | 0 | {gap:.4g} |" in report.read_text()
    assert "noise floor) | 6 | 6 | 0 | 0 | 0 | - |" in report.read_text()
