"""The CPU platform stays out of the way of real hardware, of neighbours and of a user's choices."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang_hyperdflash.cpu.platform import memory
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def test_sglang_finds_the_platform_by_its_entry_point():
    from sglang.srt.platforms import current_platform

    expected = "CudaSRTPlatform" if torch.cuda.is_available() else "TorchCpuPlatform"
    assert type(current_platform).__name__ == expected


def test_a_neighbours_gigabyte_is_not_ours(monkeypatch):
    """The host's free memory falls; what we may take does not, until we take something."""
    real = psutil.virtual_memory()
    before = memory.memory_of_this_process()
    less = real._replace(available=real.available - (6 << 30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: less)
    assert abs(memory.memory_of_this_process() - before) < 64 << 20
    kept = torch.ones(64 << 20)  # 256 MiB
    assert before - memory.memory_of_this_process() > 200 << 20
    del kept


@pytest.mark.parametrize("text", ["0", "-1", "much", "nan", "inf"])
def test_a_wrong_limit_is_named(monkeypatch, text):
    monkeypatch.setenv(memory.KV_GIB, text)
    with pytest.raises(HyperDFlashConfigError, match=memory.KV_GIB):
        memory.kv_limit()


@pytest.mark.parametrize(
    "tokens, free, expected",
    [(None, 13 << 30, 1 << 30), (None, 5 << 20, 5 << 20), (4096, 13 << 30, 13 << 30)],
)
def test_the_pool_is_bounded_unless_its_size_was_given(monkeypatch, tokens, free, expected):
    from sglang.srt import runtime_context

    schedule = SimpleNamespace(max_total_tokens=tokens)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.delenv(memory.KV_GIB, raising=False)
    assert memory.bound_kv(free, None, None) == expected
