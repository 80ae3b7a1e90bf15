"""Counts what code would do on CUDA, on a machine without it.

:class:`FakeCuda` gives fake tensors that say they are on CUDA and hold nothing. Inside of
:meth:`FakeCuda.count` every operation on them is counted, and refused where it waits for a device,
or mixes tensors of host and device. A launch of Triton, by ours or by SGLang, is caught: it counts
as one and does nothing.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.launches import cuda_ops
from tests.launches.cuda_ops import name_of, tensors
from tests.launches.traffic import kernel_bytes

# Kernels ask it for their number of programs.
H200 = SimpleNamespace(multi_processor_count=132)
HOST_VALUE = {torch.int32: 1, torch.int64: 1, torch.float32: 1.0, torch.bool: False}


class RefusedError(AssertionError):
    """What no round may do."""


class Launch(NamedTuple):
    """``count`` kernels of one operation, at one place of our code."""

    phase: str
    name: str
    place: str
    bytes: int
    count: int = 1


class Counter(TorchDispatchMode):
    """Counts ``launches``, and ``kinds``: what makes a compilation of its own, of our kernels."""

    def __init__(self, phase: str, may_wait: bool = False) -> None:
        super().__init__()
        self.phase, self.launches, self.kinds, self.may_wait = phase, [], set(), may_wait

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def cost(self, *phases: str) -> tuple[int, int]:
        these = [launch for launch in self.launches if launch.phase in phases]
        return sum(launch.count for launch in these), sum(launch.bytes for launch in these)

    def launch(self, name: str, moved: int, count: int = 1) -> None:
        self.launches.append(Launch(self.phase, name, place(), moved, count))

    def kernel(self, kernel: Any, args: tuple, kwargs: dict) -> None:
        function = kernel.fn
        while not isfunction(function):
            function = function.fn
        name = f"{function.__module__}.{function.__name__}"
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        for given in tensors(arguments):
            if given.device.type != "cuda":
                raise RefusedError(f"{name} mixes devices at {place()}")
        self.launch(name, kernel_bytes(name, arguments))
        if name.startswith("triton_ops."):
            absent = tuple(argument is None for argument in args)
            self.kinds.add((name, absent, tuple(sorted(kwargs.items()))))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        kernels = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
        if kernels("CompositeImplicitAutograd") and not kernels("CUDA"):
            with self:  # it is made of others on every device
                return func.decompose(*args, **kwargs)
        self._check(func, args, kwargs)
        if name_of(func) == "_local_scalar_dense" and not args[0].is_cuda:
            return HOST_VALUE[args[0].dtype]  # of the host's own: any will do
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise RefusedError(f"{func} waits at {place()}") from None
        if any(t.is_cuda for t in tensors([args, kwargs, result])):
            count = cuda_ops.launches(func, args)
            if count:
                self.launch(name_of(func), cuda_ops.moved(func, args, kwargs, result), count)
        return result

    def _check(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Refuse what waits for the device, or mixes devices."""
        name, given = name_of(func), list(tensors([args, kwargs]))
        devices = {tensor.device.type for tensor in given}
        on_device = "cuda" in devices
        if on_device and not self.may_wait and cuda_ops.waits(func, args):
            raise RefusedError(f"{func} waits at {place()}")
        if name in ("copy_", "_to_copy"):
            if kwargs.get("device") is not None:
                devices.add(torch.device(kwargs["device"]).type)
            later = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if len(devices) > 1 and not later and not self.may_wait:
                raise RefusedError(f"a copy between host and device waits at {place()}")
            return
        # A single value of the host travels with a launch, but not as an index.
        indices = args[1] if name.rstrip("_") in ("index", "index_put") else ()
        host = [t for t in given if t.ndim > 0] + list(tensors(indices))
        if on_device and any(tensor.device.type == "cpu" for tensor in host):
            raise RefusedError(f"{func} mixes devices at {place()}")


class FakeCuda(ExitStack):
    """A machine with a CUDA device, of which nothing exists but shapes.

    Everything in a ``with`` block runs under fake tensors in inference mode, as serving does.
    """

    counter: Counter | None = None

    def __enter__(self) -> Self:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
            if self.counter is not None:
                self.counter.kernel(kernel, args, kwargs)

        patches = [(kind, "run", run) for kind in (JITFunction, InterpretedFunction, Autotuner)]
        patches += [
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "current_stream", lambda *device: None),
            (torch.cuda, "get_device_properties", lambda device: H200),
        ]
        for patch in patches:
            self.enter_context(mock.patch.object(*patch))
        self.enter_context(FakeTensorMode())
        self.enter_context(torch.inference_mode())
        return self

    @contextmanager
    def count(self, phase: str = "", may_wait: bool = False) -> Iterator[Counter]:
        with Counter(phase, may_wait) as counter:
            self.counter = counter
            try:
                yield counter
            finally:
                self.counter = None


def place() -> str:
    """The innermost line that is neither torch's, nor Triton's, nor a stub's."""
    stubs, frame = {Path(__file__), Path(__file__).with_name("server.py")}, sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not {"torch", "triton"} & set(path.parts) and path not in stubs:
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
