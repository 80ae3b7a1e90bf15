"""SGLang's start-up on a pretended CUDA machine, one forked process for each compute capability.

Everything up to the first kernel runs: the CUDA branches of SGLang and of the libraries under it
are imported, every hook is installed and compared with its source, arguments are resolved.
"""

import ctypes
import importlib
import pkgutil
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang_hyperdflash.tools.server_process import comparable_arguments
from tests.conftest import EXAMPLE, ROOT
from tests.documents import commands, shell_fences, split_environment
from tests.unit.other_process import answer, question

# Functions of the driver that are looked up while libraries are imported; each answers "no device".
DRIVER = (
    *("cuPointerGetAttribute", "cuCtxFromGreenCtx", "cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2"),
    *("cuDevResourceGenerateDesc", "cuDevSmResourceSplitByCount", "cuDeviceGetDevResource"),
    *("cuDriverGetVersion", "cuGetErrorString", "cuGetProcAddress_v2", "cuGetProcAddress"),
    *("cuGreenCtxCreate", "cuGreenCtxDestroy", "cuGreenCtxGetDevResource", "cuStreamCreate"),
    *("cuInit", "cuDeviceGetCount", "cuDeviceGet"),
)
# What imports take longest and do not ask for the capability: once for all processes.
SHARED = ("transformers", "torchvision", "openai", "torch._inductor.compile_fx", "cutlass.cute")
FIELDS = ("attention_backend", "speculative_draft_attention_backend", "page_size")
FIELDS += ("kv_cache_dtype",)


def tiny_arguments() -> dict[str, list[str]]:
    """Server arguments: README's, the demo's baseline, and a user's choices."""
    (readme,) = (f for f in shell_fences([ROOT / "README.md"]) if f.kind == "background")
    (words,) = (split_environment(words)[1] for words in commands(readme))
    target = ("--model-path", str(EXAMPLE / "target"))
    return {
        "readme": words[3:],
        "demo": [*target, *comparable_arguments()],
        "deterministic": [*target, "--enable-deterministic-inference"],
        "fp32": [*target, "--json-model-override-args", '{"dtype": "float32"}'],
        "named": [*target, "--dtype", "float32", "--attention-backend", "flashinfer"],
    }


def load_driver() -> None:
    """A ``libcuda.so.1`` without a device; libraries that need one find it by its name."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "stub.c"), Path(folder, "libcuda.so.1")
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER))
        options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def pretend(capability: tuple[int, int]) -> None:
    """Let torch answer as on one GPU of 80 GB and 132 multiprocessors."""
    import torch

    major, minor = capability
    memory = 85_045_870_592
    facts = SimpleNamespace(major=major, minor=minor, total_memory=memory, name="NVIDIA GPU")
    facts.multi_processor_count, facts.warp_size, facts.gcnArchName = 132, 32, ""
    facts.shared_memory_per_block_optin = 232_448
    answers = {
        **{"is_available": True, "device_count": 1, "current_device": 0, "set_device": None},
        **{"get_device_capability": capability, "get_device_properties": facts},
        **{"get_device_name": facts.name, "mem_get_info": (memory - 10**9, memory)},
        **{"synchronize": None, "empty_cache": None, "is_bf16_supported": True},
        "is_current_stream_capturing": False,
    }
    for name, given in answers.items():
        setattr(torch.cuda, name, lambda *_, given=given, **__: given)


def resolved(arguments: list[str]) -> list[Any]:
    """The fields of a server's arguments, and the dtype that its model will have."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    values = server_args.resolved_dict()
    dtype = str(ModelConfig.from_server_args(server_args).dtype).removeprefix("torch.")
    return [*(values[name] for name in FIELDS), dtype]


def hooked() -> list[str]:
    """Import every module that is hooked here, and name the hooks in place."""
    from sglang_hyperdflash import seams

    for seam in seams.recorded:
        pkgutil.resolve_name(seam.target)
    seams.check_installed()
    return sorted(seams.in_place)


def attention() -> list[str]:
    """Libraries' attention that takes what ``check --gpu`` gives it."""
    import flashinfer
    import torch
    from sgl_kernel import flash_attn
    from sglang.kernels.ops.attention import flash_attention_v4

    from sglang_hyperdflash.commands.check_attention import BACKENDS, new_batch

    kernel, wrapper = "flash_attn_with_kvcache", "BatchPrefillWithPagedKVCacheWrapper"
    places = {"fa3": (flash_attn, kernel), "fa4": (flash_attention_v4, kernel)}
    places["flashinfer"] = flashinfer, wrapper
    for name, (module, function) in places.items():
        with mock.patch.object(module, function, autospec=True):
            BACKENDS[name](new_batch("page 1", "cpu", torch.float32), True)
    return sorted(places)


def served(capability: list[int], cases: dict[str, list[str]], hooks: bool) -> list[Any]:
    """What a server of that GPU resolves in every case, and its hooks if they are asked for."""
    pretend(tuple(capability))
    values = {name: resolved(case) for name, case in cases.items()}
    return [values, hooked() if hooks else [], attention() if hooks else []]


def main() -> None:
    """Answer the machines on stdin: compute capability, cases, and hooks or not."""
    load_driver()
    pretend((0, 0))
    for name in SHARED:
        importlib.import_module(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    answers = []
    for machine in question():  # a process each: SGLang keeps what it has read of the GPU
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            answers.append(pool.submit(served, *machine).result())
    answer(answers)


if __name__ == "__main__":
    main()
