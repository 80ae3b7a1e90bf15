"""With our plugin loaded, DeepSeek-V4 starts with SGLang's own algorithms exactly as without it."""

from __future__ import annotations

import pytest

from tests.unit.serving.v4_shapes import DSPARK, SHAPES, V41, target_folder
from tests.unit.targets.v4_start import start

NODE = {"gpu_gib": 141.0, "weights_gib": 40.0}
METHODS = ("baseline", "EAGLE", "DSPARK")
# Drawn anew by every start.
RANDOM = {"random_seed"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> tuple[dict[str, dict], dict[str, dict]]:
    """Of every case: with our plugin, and with SGLang told to load none."""
    root = tmp_path_factory.mktemp("others")
    cases = {}
    for name, shape in {**SHAPES, "v41": V41}.items():
        target = str(target_folder(root / name, shape | DSPARK))
        for method in METHODS if name in SHAPES else ("DSPARK",):
            case = {"target": target, "draft": None, "method": method, "node": NODE, "whole": True}
            cases[f"{name} {method}"] = case | {"size": name in SHAPES}
    ours = {"target": target, "draft": None, "method": "HYPERDFLASH", "node": NODE, "size": False}
    plain = start(cases | {"ours": ours}, SGLANG_PLUGINS="no-such-plugin")
    return start(cases), plain


def test_every_resolved_field_is_sglangs_own(answers):
    ours, plain = answers
    assert len(ours) == 7
    for case in ours:
        assert "error" not in ours[case], ours[case]
        found, expected = ours[case].pop("whole"), plain[case].pop("whole")
        assert len(expected) > 300
        differ = {name for name in expected if found[name] != expected[name]}
        assert differ <= RANDOM, case
        assert ours[case] == plain[case], case


def test_the_draft_of_dspark_is_sized_by_sglang(answers):
    """As one more layer of the target, its rings included."""
    for name, shape in SHAPES.items():
        budgets = {method: answers[0][f"{name} {method}"]["budget"] for method in METHODS}
        dspark, eagle = budgets["DSPARK"], budgets["EAGLE"]
        assert dspark["draft_bytes_per_token"] == pytest.approx(eagle["draft_bytes_per_token"])
        assert 0 < dspark["tokens"] < budgets["baseline"]["tokens"]
        layers = shape["num_hidden_layers"]
        plain = dspark["bytes_per_token"] - dspark["draft_bytes_per_token"]
        assert dspark["bytes_per_token"] == pytest.approx(plain * (layers + 1) / layers, rel=1e-9)


def test_without_the_plugin_ours_is_unknown(answers):
    """That the comparison is one: the second process really had no plugin."""
    assert "Only EAGLE and DSPARK" in answers[1]["ours"]["error"]
