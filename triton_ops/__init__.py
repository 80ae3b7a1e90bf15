"""The Triton kernels of HyperDFlash; importing this package needs torch only."""

from triton_ops.hc_gate import hc_gate_reduce_reference
from triton_ops.hc_gate_op import hc_gate_reduce

__all__ = ["hc_gate_reduce", "hc_gate_reduce_reference"]
