"""What SGLang makes of our commands on machines with a GPU, which this one need not have."""

from __future__ import annotations

import json

import pytest

from sglang_hyperdflash.plugin import SERVING_SEAMS
from sglang_hyperdflash.tools.server_process import comparable_arguments, hyperdflash_arguments
from tests.conftest import EXAMPLE, ROOT
from tests.documents import commands, shell_fences
from tests.unit.other_process import ask

V4 = ROOT / "examples" / "deepseek_v4_flash_config"
# Attention of a drafter without a window, whose target is V4.
V4_GPUS = {"sm_90": "fa3", "sm_100": "fa4", "sm_120": "triton"}
CAPABILITIES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0)}
CAPABILITIES |= {"sm_120": (12, 0)}
TARGET = ("--model-path", str(EXAMPLE / "target"))
CPU = "torch_reference"


@pytest.fixture(scope="module")
def tiny() -> dict[str, list[str]]:
    """Server arguments: README's, the demo's baseline, and a user's own choice."""
    (readme,) = (f for f in shell_fences([ROOT / "README.md"]) if f.kind == "background")
    (words,) = commands(readme)
    return {
        "readme": words[3:],
        "demo": [*TARGET, *comparable_arguments()],
        "deterministic": [*TARGET, "--enable-deterministic-inference"],
        "fp32": [*TARGET, "--json-model-override-args", '{"dtype": "float32"}'],
        "named": [*TARGET, "--dtype", "float32", "--attention-backend", "flashinfer"],
    }


@pytest.fixture(scope="module")
def started(tiny, tmp_path_factory):
    """What every GPU resolves, and its hooks."""
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
        (capability, tiny | (v4 if name in V4_GPUS else {}), name in V4_GPUS)
        for name, capability in CAPABILITIES.items()
    ]
    cache = str(tmp_path_factory.mktemp("triton"))
    options = {"warm": False, "seconds": 3600, "TRITON_CACHE_DIR": cache}
    found = ask("tests.unit.cuda_start", machines, **options)
    return dict(zip(CAPABILITIES, found, strict=True))


@pytest.mark.parametrize("gpu", CAPABILITIES)
def test_a_gpu_serves_the_tiny_target_with_triton_in_bf16(started, gpu):
    """Found as: README's command took a backend without fp32 or without sinks on every GPU."""
    cases, _ = started[gpu]
    assert cases["readme"] == ["triton", "triton", 1, "auto", "bfloat16"]
    assert cases["demo"] == cases["deterministic"] == ["triton", None, 1, "auto", "bfloat16"]
    assert cases["fp32"] == cases["demo"], "SGLang's auto makes fp16 of an fp32 checkpoint"
    assert cases["named"] == ["flashinfer", None, 1, "auto", "float32"]


@pytest.mark.parametrize("gpu, attention", V4_GPUS.items())
def test_a_gpu_starts_v4_with_every_hook_in_place(started, gpu, attention):
    cases, hooks = started[gpu]
    assert cases["v4"] == ["dsv4", attention, 256, "fp8_e4m3", "bfloat16"]
    assert cases["v4 windowed"] == ["dsv4", "triton", 256, "fp8_e4m3", "bfloat16"]
    assert hooks == sorted(seam.target for seam in SERVING_SEAMS if seam.only_with is None)


def test_a_cpu_serves_the_tiny_target_in_fp32(tiny):
    del tiny["named"], tiny["fp32"]
    ((cases, _),) = ask("tests.unit.cuda_start", [(None, tiny, False)])
    assert cases["readme"] == [CPU, CPU, 1, "auto", "float32"]
    assert cases["demo"] == cases["deterministic"] == [CPU, None, 1, "auto", "float32"]
