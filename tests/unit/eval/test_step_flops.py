"""A V4-width step's products run in bf16, counted on fake tensors."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eval import step_flops
from eval.step_flops import ProductFlops, Step, count, fake_pair
from sglang_hyperdflash.training.anchors import dense_mask, visible
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.vocabulary import bf16_products, vocabulary_logits
from tests.conftest import ROOT

RAW = json.loads((ROOT / "examples/deepseek_v4_flash_config/drafter/config.json").read_bytes())


@pytest.mark.parametrize("loss", ["ce_kl", "acceptance"])
def test_a_steps_products_are_bf16_but_where_the_file_says_fp32(loss):
    """Found as: 44 % of the operations at the rate of fp32."""
    step = Step(samples=1, tokens=700, anchors=64)
    found = count(RAW, step, Objective(loss=loss))
    assert found.get("float32", 0) < 0.05 * found["bfloat16"]
    exact = count(RAW, step, Objective(loss=loss), bf16=False)
    assert exact == {"float32": sum(found.values())}


def test_fake_cuda_tensors_take_the_same_types():
    device = torch.device("cuda")
    there = mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    able = mock.patch("torch.cuda.is_bf16_supported", lambda: True)
    with there, able, FakeTensorMode(allow_non_fake_inputs=True), device:
        drafter, ends = fake_pair(RAW, device)
        d, v, block = RAW["hidden_size"], RAW["vocab_size"], RAW["block_size"]
        with ProductFlops() as head, bf16_products(device, True):
            logits = vocabulary_logits(ends.lm_head, torch.empty(8, d))
        assert (logits.dtype, logits.device.type) == (torch.float32, "cuda")
        assert head.by_dtype == {"bfloat16": 2 * 8 * d * v}
        anchors = torch.zeros(1, 3, dtype=torch.long)
        mask = dense_mask(visible(anchors, anchors == 0, 50, block), 1, 21, 71, device)
        with ProductFlops() as layers, torch.autocast("cuda", torch.bfloat16):
            drafter(torch.empty(1, 50, d), torch.empty(1, 3, block, d), anchors, mask)
        assert set(layers.by_dtype) == {"bfloat16"}


def test_the_command_writes_what_it_counts(tmp_path, monkeypatch):
    out = tmp_path / "step.json"
    monkeypatch.setattr(step_flops, "Step", lambda: Step(samples=1, tokens=300, anchors=8))
    folder = ROOT / "examples/deepseek_v4_flash_config/drafter"
    monkeypatch.setattr("sys.argv", ["step_flops", "--draft", str(folder), "--out", str(out)])
    step_flops.main()
    found = json.loads(out.read_text())
    assert sum(found["bf16"].values()) == found["bf16 = false"]["float32"] > 0
