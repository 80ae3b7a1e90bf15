"""The reducer on a CUDA device: which kernels run, and under graphs."""

import pytest
import torch

from sglang_hyperdflash.draft.reducer import HCGateReducer, check_kernels
from tests.unit.triton_ops.gate_help import EPSILONS, random_arguments, relative_error, tensors_of
from triton_ops import hc_gate_reduce, hc_gate_reduce_reference
from triton_ops.hc_gate_op import ROW_KERNEL_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("tokens, kernel", [(7, "_row_kernel"), (512, "_tile_kernel")])
def test_the_served_module_runs_our_kernel_and_no_other(tokens, kernel):
    reducer = HCGateReducer(4, 256, rms_eps=1e-6, hc_eps=1e-6).cuda()
    norm = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, 1024, device="cuda").bfloat16()
    check_kernels(reducer, norm)
    with torch.inference_mode(), torch.profiler.profile() as profile:
        reducer(hidden, norm)
        torch.cuda.synchronize()
    ran = [event.key for event in profile.key_averages() if event.device_type.name == "CUDA"]
    assert any(kernel in name for name in ran), ran
    # Besides it only the clearing of the tiles' flags.
    assert all(any(part in name for part in (kernel, "Fill", "Memset")) for name in ran), ran


@pytest.mark.parametrize("tokens", [1, ROW_KERNEL_TOKENS, ROW_KERNEL_TOKENS + 1, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_v4_flash_widths(tokens, dtype):
    a = random_arguments(tokens, 4, 4096, dtype=dtype)
    exact = hc_gate_reduce_reference(a.hidden.float(), *tensors_of(a)[1:], **EPSILONS)
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-5
    for _ in range(20):  # apply items wait for stats items: any lost wait shows as a moving error
        assert relative_error(hc_gate_reduce(*tensors_of(a), **EPSILONS), exact) < limit


@pytest.mark.parametrize("tokens", [7, 1000])
def test_inside_a_cuda_graph(tokens):
    a = random_arguments(tokens, 4, 256, dtype=torch.bfloat16)
    expected = hc_gate_reduce(*tensors_of(a), **EPSILONS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            output = hc_gate_reduce(*tensors_of(a), **EPSILONS)
        for _ in range(3):
            output.fill_(float("nan"))
            graph.replay()
            assert torch.equal(output, expected)
