"""What SGLang makes of our commands on machines with a GPU, which this one need not have."""

import json

import pytest

from sglang_hyperdflash.plugin import SERVING_SEAMS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.conftest import ROOT
from tests.unit.cuda_start import tiny_arguments
from tests.unit.other_process import ask

pytestmark = pytest.mark.heavy

V4 = ROOT / "examples" / "deepseek_v4_flash_config"
# Compute capability, and the attention of a drafter without a window whose target is V4.
GPUS = {"sm_80": ((8, 0), None), "sm_90": ((9, 0), "fa3"), "sm_100": ((10, 0), "fa4")}
GPUS |= {"sm_120": ((12, 0), "triton")}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """What each GPU resolves, and its hooks."""
    folder = tmp_path_factory.mktemp("drafter")
    config = json.loads((V4 / "drafter" / "config.json").read_text())
    config["hyperdflash_config"]["window"] = None
    (folder / "config.json").write_text(json.dumps(config))
    dummy = ["--model-path", str(V4 / "target"), "--load-format", "dummy", "--skip-tokenizer-init"]
    v4 = {
        "v4": [*dummy, *hyperdflash_arguments(folder)],
        "v4 windowed": [*dummy, *hyperdflash_arguments(V4 / "drafter")],
    }
    machines = [
        (capability, tiny_arguments() | (v4 if attention else {}), attention is not None)
        for capability, attention in GPUS.values()
    ]
    cache = str(tmp_path_factory.mktemp("triton"))
    options = {"seconds": 3600, "TRITON_CACHE_DIR": cache}
    answers = ask("tests.unit.cuda_start", machines, **options)
    return dict(zip(GPUS, answers, strict=True))


def test_gpus_serve_the_tiny_target_in_bf16_and_start_v4_with_every_hook(started):
    """Other backends than Triton lack fp32 or sinks; SGLang's auto makes fp16 of fp32."""
    for gpu, (cases, hooks, attention) in started.items():
        assert cases["readme"] == ["triton", "triton", 1, "auto", "bfloat16"], gpu
        for name in ("demo", "deterministic", "fp32"):
            assert cases[name] == ["triton", None, 1, "auto", "bfloat16"], (gpu, name)
        assert cases["named"] == ["flashinfer", None, 1, "auto", "float32"], gpu
        if chosen := GPUS[gpu][1]:
            assert attention == ["fa3", "fa4", "flashinfer"]
            assert cases["v4"] == ["dsv4", chosen, 256, "fp8_e4m3", "bfloat16"], gpu
            assert cases["v4 windowed"] == ["dsv4", "triton", 256, "fp8_e4m3", "bfloat16"], gpu
            assert hooks == sorted(seam.target for seam in SERVING_SEAMS if not seam.only_with)
