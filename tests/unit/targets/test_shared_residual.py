"""Every captured batch leaves its residual in one buffer; nothing is lost where it does not fit."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

from sglang_hyperdflash.targets import shared_residual
from sglang_hyperdflash.targets.shared_residual import SharedResidual


def passed(hook: SharedResidual, residual: torch.Tensor | None) -> torch.Tensor | None:
    """What a graph keeps of a forward pass with this residual."""
    output = LogitsProcessorOutput(next_token_logits=None, hidden_states=residual)
    hook(None, output, None, 0 if residual is None else len(residual))
    return output.hidden_states


def test_sizes_and_widths_share_the_buffer_of_the_largest():
    hook, kept = SharedResidual(), []
    assert passed(hook, None) is None
    hook(None, SimpleNamespace(), None, 3)
    for rows in (28, 28, 14, 4):  # a warm-up and its capture first
        residual = torch.randn(rows, 8)
        kept.append(passed(hook, residual))
        assert torch.equal(kept[-1], residual) and kept[-1] is not residual
    assert len({rows.data_ptr() for rows in kept}) == 1


@pytest.mark.parametrize("other", [torch.randn(40, 8), torch.randn(4, 6), torch.randn(4, 8).half()])
def test_a_capture_that_has_no_place_keeps_its_tensor(monkeypatch, other):
    hook = SharedResidual()
    first = passed(hook, torch.randn(28, 8))
    monkeypatch.setattr(shared_residual, "being_captured", lambda tensor: True)
    assert passed(hook, other) is other
    assert passed(hook, torch.randn(4, 8)).data_ptr() == first.data_ptr()
    # Outside a capture there is memory for one that fits.
    monkeypatch.setattr(shared_residual, "being_captured", lambda tensor: False)
    assert torch.equal(passed(hook, other), other) and passed(hook, other) is not other


def test_sglang_warms_a_shape_up_before_it_captures_it():
    one = inspect.getsource(FullCudaGraphBackend.capture_one)
    assert one.index("for warmup_step in range(2)") < one.index("torch.cuda.CUDAGraph()")
