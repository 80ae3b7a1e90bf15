"""``check --gpu`` and a server's start, with kernels interpreted: what is wrong is said."""

import dataclasses
import importlib
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash import cli
from sglang_hyperdflash.commands import check, check_attention, check_gpu
from sglang_hyperdflash.commands.check_gpu import Case
from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.serving.startup import operators
from sglang_hyperdflash.serving.verification.rehearsal import BROKEN, RANDOM, TIES, Numbers
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.unit.triton_ops.gate_help import DEVICE, sglang_kernels
from triton_ops import operator
from triton_ops.verification import row_statistics

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are interpreted")
SMALL = check_gpu.Sizes(
    **{"device": "cpu", "dtype": torch.float32, "vocabulary": 23, "candidates": 3, "rank": 4},
    **{"widths": (3,), "reducers": ((2, 64),), "tokens": (1, 3)},
    **{"heads": (4, 2, 32), "lengths": (1, 17, 40)},
    cases=(Case(RANDOM, True), Case(TIES, False), Case(BROKEN, True, 1)),
)


def interpreted(monkeypatch, name: str) -> None:
    """One of SGLang's modules with kernels, interpreted, whatever imported it before."""
    module = SimpleNamespace(**sglang_kernels(name))
    monkeypatch.setitem(sys.modules, f"sglang.kernels.ops.{name}", module)


def plant(monkeypatch, name: str) -> None:
    """A kernel that is wrong in one entry: of its last result, or of what it writes in place."""
    module, _, function = operator.OPERATORS[name].kernel.partition(":")
    right = getattr(importlib.import_module(module), function)

    def wrong(*arguments):
        results = right(*arguments)
        written = {"adjust_rows": 0, "learn": 16}.get(name)
        last = results[-1] if isinstance(results, tuple) else results
        last = last if written is None else arguments[written]
        last.view(-1)[last.numel() // 2 :][:1] += 1
        return results

    monkeypatch.setattr(f"{module}.{function}", wrong)


def pretend_gpu(monkeypatch) -> None:
    """What the command asks of a GPU; and no message is switched off in the whole process."""
    for name, value in (
        ("is_available", True),
        ("get_device_capability", (12, 0)),
        ("get_device_name", "a GPU"),
        ("max_memory_allocated", 1 << 30),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(check.logging, "disable", lambda level: None)


@pytest.mark.heavy
def test_right_kernels_are_right_on_every_kind_of_numbers(monkeypatch):
    interpreted(monkeypatch, "layernorm.mhc_head")
    findings = list(check_gpu.examine_gpu(SMALL, []))
    assert [finding.wrong for finding in findings] == [None] * len(findings)
    counted = [finding.subject for finding in findings if finding.batches]
    assert counted == [*operator.OPERATORS, "hc_gate_reduce as hc_head"]
    assert operator.interceptor is None


@pytest.mark.heavy
def test_wrong_kernels_are_named_and_make_the_command_fail(monkeypatch, capsys, tmp_path):
    interpreted(monkeypatch, "layernorm.mhc_head")
    interpreted(monkeypatch, "attention.extend_attention")
    for name in operator.OPERATORS:
        plant(monkeypatch, name)
    small = dataclasses.replace(SMALL, cases=(Case(RANDOM, True),))
    monkeypatch.setattr(check_gpu, "Sizes", lambda: small)
    monkeypatch.setattr(check_attention, "uncompiled_flashinfer_modules", lambda: ["attention"])
    pretend_gpu(monkeypatch)
    report = tmp_path / "report.json"
    assert cli.main(["check", "--gpu", "--json", str(report)]) == 1
    said = capsys.readouterr().out
    findings = {each["subject"]: each for each in json.loads(report.read_text())["findings"]}
    wrong = {name for name, finding in findings.items() if finding["wrong"]}
    assert wrong == {*operator.OPERATORS, "hc_gate_reduce as hc_head"}
    assert all(findings[name]["wrong"] in said for name in wrong)
    assert findings["draft attention, triton, page 256"]["batches"] and "--all" in said


@pytest.mark.heavy
def test_a_start_replaces_a_wrong_kernel_on_all_ranks_and_goes_on(monkeypatch, caplog):
    plant(monkeypatch, "accept")
    monkeypatch.setattr(operator, "reference_operators", set())
    norm, reducer = torch.ones(64), HCGateReducer(2, 64, rms_eps=1e-6, hc_eps=1e-6)
    norms = SimpleNamespace(weight=norm)
    draft = SimpleNamespace(hidden_norm=norms, reducer_module=reducer, dependency=None)
    other_rank = {"hc_gate_reduce": "raised there"}
    operators.check_operators(draft, 3, 23, (2,), 1, lambda wrong: [wrong, other_rank])
    assert operator.reference_operators == {"accept", "hc_gate_reduce"}
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and "result" in said[0] and "raised there" in said[1]
    assert operators.kernels_in_use(True) == "triton (torch: accept, hc_gate_reduce)"


@pytest.mark.parametrize("replays", [True, False])
def test_a_captured_launch_is_replayed_from_the_same_arguments(monkeypatch, replays):
    """Capture, in pretence: a replay launches again into the captured results, or does nothing."""
    launch, captured = operator.Operator.launch, []

    def launched(op, *arguments):
        captured[:] = op, arguments, launch(op, *arguments)
        return captured[2]

    class Graph:
        def replay(self):
            op, arguments, results = captured
            if replays:
                for old, new in zip(results, launch(op, *arguments), strict=True):
                    old.copy_(new)

    for name, value in (("CUDAGraph", Graph), ("graph", nullcontext), ("synchronize", int)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(operator.Operator, "launch", launched)
    rows = Numbers(RANDOM, 23, 3, 2, "cpu", torch.Generator().manual_seed(0)).rows(None)
    ones, positions = torch.ones(4), torch.arange(8).view(4, 2)
    requests = ones, 30 * ones.int(), ones.bool(), torch.arange(4), positions
    with check_gpu.GraphComparison(on_gpu=True) as comparison:
        row_statistics(rows, *requests, None, True)
    assert ("CUDA graph" in comparison.wrong.get("row_statistics", "")) is not replays
    for name in ("capture", "replay_us", "events_ms"):
        work = (lambda call, *_: call()) if name == "events_ms" else (lambda *_: 1.0)
        monkeypatch.setattr(check_gpu, name, lambda *given, work=work: work(*given) is None or 1.0)
    times = check_gpu._times(*comparison.timed["row_statistics"])
    assert times.keys() == {"kernel", "torch", "SGLang"}


def test_an_operator_that_does_not_exist_is_refused(monkeypatch):
    for value in ("", "triton", "torch", "accept, finish"):
        monkeypatch.setenv(operator.OPERATORS_VARIABLE, value)
        operators.check_operator_names()
    monkeypatch.setenv(operator.OPERATORS_VARIABLE, "accept,finnish")
    with pytest.raises(HyperDFlashConfigError, match="finnish"):
        operators.check_operator_names()


# Attention as libraries define it, in torch: what they are given decides.


def flash_attn_with_kvcache(
    q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, causal, **_
):
    """sgl_kernel's, in torch."""
    pages, page = page_table.long(), k_cache.shape[1]
    slots = (pages.unsqueeze(2) * page + torch.arange(page)).flatten(1)
    k, v = (cache.flatten(0, 1) for cache in (k_cache, v_cache))
    block = int(cu_seqlens_q[1])
    batch = check_attention.Batch(q, k, v, slots, cache_seqlens - block, block, page)
    return check_attention.reference(batch, causal)


class Wrapper:
    """FlashInfer's, in torch."""

    def __init__(self, workspace, layout, backend):
        assert layout == "NHD"

    def plan(self, starts, ends, slots, last, *sizes, causal, **_):
        assert sizes[-1] == 1 and last.tolist() == [1] * (len(ends) - 1)
        self.starts, self.ends, self.slots, self.causal = starts, ends, slots.long(), causal

    def run(self, q, cache):
        lengths, block = self.ends.diff(), int(self.starts[1])
        slots = torch.nn.utils.rnn.pad_sequence(self.slots.split(lengths.tolist()), True)
        k, v = (t.squeeze(1) for t in cache)
        batch = check_attention.Batch(q, k, v, slots, lengths - block, block, 1)
        return check_attention.reference(batch, self.causal)


@pytest.mark.parametrize("name", check_attention.BACKENDS)
def test_a_draft_s_attention_reads_its_slots(name, monkeypatch):
    """Every kernel gets the right slots and masks; a wrong page and a lost mask are seen."""
    interpreted(monkeypatch, "attention.extend_attention")
    flash = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(flash_attn=flash))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", flash)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.flash_attention_v4", flash)
    infer = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", infer)
    right = check_attention.BACKENDS[name]
    findings = [
        check_gpu.attention(SMALL, name, layout) for layout in check_attention.layouts(name)
    ]
    assert all(finding.wrong is None and finding.batches == 2 for finding in findings)

    def lost_page(batch, causal):
        slots = batch.slots.clone()
        slots[-1] = slots[0]
        return right(dataclasses.replace(batch, slots=slots), causal)

    for wrong, rows in ((lost_page, "whole"), (lambda batch, _: right(batch, False), "causal")):
        monkeypatch.setitem(check_attention.BACKENDS, name, wrong)
        assert rows in check_gpu.attention(SMALL, name, "page 256").wrong
    monkeypatch.setitem(check_attention.BACKENDS, name, lambda *_: importlib.import_module("no.x"))
    finding = check_gpu.attention(SMALL, name, "page 1")
    assert finding.wrong is None and not finding.batches and finding.note


def test_a_kernel_that_ends_the_gpu_is_named_and_ends_the_command(monkeypatch, capsys):
    """No reference can replace it: nothing runs in that process any more."""

    def lost(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("triton_ops.propose_kernel.launch_greedy", lost)
    monkeypatch.setattr(check_gpu, "Sizes", lambda: SMALL)
    monkeypatch.setattr(check_attention, "uncompiled_flashinfer_modules", list)
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert cli.main(["check", "--gpu"]) == 1
    assert "HYPERDFLASH_OPERATORS=propose_greedy" in capsys.readouterr().out
