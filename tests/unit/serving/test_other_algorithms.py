"""With our plugin loaded, DeepSeek-V4 starts with SGLang's own algorithms exactly as without it."""

import pytest

from tests.unit.serving.v4_shapes import DSPARK, FLASH, V41, target_folder
from tests.unit.targets.v4_start import start

pytestmark = pytest.mark.heavy

NODE = {"gpu_gib": 141.0, "weights_gib": 40.0}
# Target and algorithm. SGLang's pool sizes are compared too, but for V4.1, of which it has none.
CASES = {"flash EAGLE": FLASH, "flash DSPARK": FLASH, "v41 DSPARK": V41}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> tuple[dict[str, dict], dict[str, dict]]:
    """Of every case: with our plugin, and with SGLang told to load none."""
    root, cases = tmp_path_factory.mktemp("others"), {}
    for name, shape in CASES.items():
        folder, method = name.split()
        target = str(target_folder(root / folder, shape | DSPARK))
        case = {"target": target, "draft": None, "method": method, "node": NODE, "whole": True}
        cases[name] = case | {"size": shape is FLASH}
    ours = {"target": target, "draft": None, "method": "HYPERDFLASH", "node": NODE, "size": False}
    plain = start(cases | {"ours": ours}, SGLANG_PLUGINS="no-such-plugin")
    return start(cases), plain


@pytest.mark.slow
def test_every_resolved_field_is_sglangs_own(answers):
    ours, plain = answers
    assert "error" in plain["ours"], "the second process had the plugin"
    for case in CASES:
        assert "error" not in ours[case], ours[case]
        found, expected = ours[case].pop("whole"), plain[case].pop("whole")
        differ = {name for name in expected if found[name] != expected[name]}
        assert len(expected) > 300 and differ <= {"random_seed"}, case
        assert ours[case] == plain[case], case
