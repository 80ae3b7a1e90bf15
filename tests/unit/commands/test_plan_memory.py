"""Bytes besides K/V: each formula against the tensors that the serving code allocates."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.models.dflash import _project_candidate_logits

from sglang_hyperdflash.commands.plan_memory import VERIFY_MATRICES, Shape, extra_device_memory
from sglang_hyperdflash.draft.adjust import Adjustments, adjust_rows
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose
from sglang_hyperdflash.serving.verification import exact
from sglang_hyperdflash.serving.verification.exact import read_rows, verify_block, weights_of
from triton_ops import accept_kernel, adjust_kernel, finish_kernel, rows_kernel

pytestmark = pytest.mark.heavy

BATCH, BLOCK, VOCABULARY, WIDTH = 3, 7, 20_000, 8
SIZES = {"block": BLOCK, "widths": [BLOCK], "residual": 64, "vocabulary": 1000, "context": 2048}
SHAPE = Shape(requests=8, captured=[4, 8], **SIZES, page=256, heads=32, head_dim=128)
RESIDUAL, LOGITS = "residual of the captured batches", "drafts' logits"
CANDIDATES = "drafts' candidates"


def peak_bytes(function) -> int:
    """The most memory that a function held at once, by torch's own record of its allocator."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, size in steps:
        held += size
        most = max(most, held)
    return most


def copied(probs: torch.Tensor, _limit: torch.Tensor) -> torch.Tensor:
    """FlashInfer's renormalisation as far as memory goes: one matrix of its own."""
    return probs.clone()


@pytest.mark.parametrize("filters", [True, False])
def test_verification_s_peak_is_what_is_counted(monkeypatch, filters):
    """With the launches of a GPU, in matrices ``[N, V]`` of fp32; none without filters."""
    kernels = {"row_statistics": rows_kernel, "accept": accept_kernel, "finish": finish_kernel}
    for name, kernel in kernels.items():
        monkeypatch.setattr(exact, name, kernel.launch)
    vocabulary, ones = 5_000, torch.ones(BATCH)  # interpreted kernels take their time
    flags = (filters, filters, filters, True)
    each = Sampling(ones, 40 * ones.int(), 0.9 * ones, 0.01 * ones, *flags)
    each = replace(each, need_top_k=filters, need_top_p=filters, need_min_p=filters)
    logits = torch.randn(BATCH * BLOCK, vocabulary)
    ids = torch.arange(WIDTH).repeat(BATCH, BLOCK - 1, 1)
    seeds, places = torch.arange(BATCH), torch.arange(BLOCK).repeat(BATCH, 1)
    draws = Draws(seeds, seeds % 2 == 0)
    candidates = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32))
    proposal = propose(candidates, None, places, places, each, draws, 1.0)

    def verify() -> None:
        by_block, kept = logits.view(BATCH, BLOCK, -1), None
        if each.filters:
            kept = weights_of(by_block, each, (copied, copied)).flatten(0, 1)
        rows = read_rows(logits, kept, each, draws, places, all_draw=False)
        verify_block(rows, places, places, proposal, each, draws, vocabulary)

    matrices = peak_bytes(verify) / (4 * BATCH * BLOCK * vocabulary)
    assert matrices == pytest.approx(VERIFY_MATRICES, abs=0.01) if filters else matrices < 0.05


@pytest.mark.parametrize("kernel", [True, False])
def test_penalties_of_a_whole_batch_hold_nothing(kernel):
    """They come before verification and are not rehearsed; without the kernel, end tokens alone."""
    block, rows = torch.zeros(BATCH, BLOCK, dtype=torch.int64), torch.arange(BATCH)
    ends, earliest = torch.tensor([[1, 2], [3, -1], [4, 5]]), torch.full((BATCH,), 12)
    changes, adjust = Adjustments(end_ids=ends, earliest=earliest), adjust_rows
    if kernel:
        counts = torch.randint(0, 3, (BATCH, VOCABULARY), dtype=torch.int32)
        values = torch.tensor([[0.1, 0.2, 1.3]]).repeat(BATCH, 1)
        bias = torch.randn(BATCH, VOCABULARY)
        changes = Adjustments(counts, rows, values, ends, earliest, bias)
        adjust = adjust_kernel.launch
    logits = torch.randn(BATCH, BLOCK, VOCABULARY)
    peak = peak_bytes(lambda: adjust(logits, block, block, *changes.tensors))
    assert logits.isinf().any(-1).all()
    assert peak < 4 * BATCH * VOCABULARY / 50, peak


def test_all_sizes_share_one_residual_and_a_head_has_its_gates():
    one, more = extra_device_memory(SHAPE), extra_device_memory(replace(SHAPE, rank=16))
    assert one[RESIDUAL] == more[RESIDUAL] == 2 * 8 * 7 * 64
    assert more[CANDIDATES] - one[CANDIDATES] == 8 * 6 * 16 * 4
    eager = extra_device_memory(replace(SHAPE, captured=[]))
    assert eager[RESIDUAL] == eager[CANDIDATES] == eager[LOGITS] == 0


def test_a_draft_s_graph_projects_its_rows_at_once():
    drafts, hidden = BATCH * (BLOCK - 1), 16
    head = SimpleNamespace(weight=torch.randn(VOCABULARY, hidden, dtype=torch.bfloat16))
    rows = torch.randn(drafts, hidden, dtype=torch.bfloat16)

    def project() -> None:
        _project_candidate_logits(rows, head, num_org=VOCABULARY, use_quant_head=False)

    batches = replace(SHAPE, requests=BATCH, captured=[1, BATCH], vocabulary=VOCABULARY)
    counted = extra_device_memory(batches)[LOGITS]
    assert counted == 2 * drafts * VOCABULARY
    # A product on a CPU has some KiB of scratch; how many is the processor's.
    assert counted <= peak_bytes(project) < counted + 2**16
    assert extra_device_memory(replace(batches, shards=8))[LOGITS] == counted / 8
