"""Bytes besides K/V: each formula against the tensors that the serving code allocates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.commands.plan_memory import (
    VERIFY_MATRICES,
    Shape,
    extra_device_memory,
)
from sglang_hyperdflash.draft.adjust import Adjustments, adjust_rows
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose
from sglang_hyperdflash.serving.verification import exact
from sglang_hyperdflash.serving.verification.exact import read_rows, verify_block, weights_of
from triton_ops import accept_kernel, adjust_kernel, finish_kernel, rows_kernel

BATCH, BLOCK, VOCABULARY, WIDTH = 3, 7, 60_000, 8
SHAPE = Shape(
    requests=8,
    captured=[4, 8],
    block=BLOCK,
    widths=[BLOCK],
    residual=64,
    vocabulary=1000,
    context=2048,
    page=256,
    heads=32,
    head_dim=128,
)


def sampling(rows: int) -> Sampling:
    """Every filter, so the most that a batch may need."""
    ones = torch.ones(rows)
    return Sampling(ones, 40 * ones.int(), 0.9 * ones, 0.01 * ones, True, True, True, True)


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


def verification_matrices(each: Sampling, renorm: tuple | None, monkeypatch) -> float:
    """Peak of one verification with the launches of a GPU, in matrices ``[N, V]`` of fp32."""
    for name, kernel in (
        ("row_statistics", rows_kernel),
        ("accept", accept_kernel),
        ("finish", finish_kernel),
    ):
        monkeypatch.setattr(exact, name, kernel.launch)
    vocabulary = 12_000  # interpreted kernels take their time
    logits = torch.randn(BATCH * BLOCK, vocabulary)
    ids = torch.arange(WIDTH).repeat(BATCH, BLOCK - 1, 1)
    seeds, at = torch.arange(BATCH), torch.arange(BLOCK).repeat(BATCH, 1)
    draws = Draws(seeds, seeds % 2 == 0)
    found = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32))
    proposal = propose(found, None, at, at, each, draws, torch.ones(2))

    def verify() -> None:
        by_block, kept = logits.view(BATCH, BLOCK, -1), None
        if each.filters:
            kept = weights_of(by_block, each, renorm).flatten(0, 1)
        rows = read_rows(logits, kept, each, draws, at, all_draw=False)
        verify_block(rows, at, at, proposal, each, draws, vocabulary)

    found = peak_bytes(verify) / (4 * BATCH * BLOCK * vocabulary)
    print(f"{found:.2f} matrices at once")
    return found


def test_verification_s_peak_is_what_is_counted(monkeypatch):
    found = verification_matrices(sampling(BATCH), (copied, copied), monkeypatch)
    assert found == pytest.approx(VERIFY_MATRICES, abs=0.01)


def test_verification_without_filters_writes_no_matrix(monkeypatch):
    plain = replace(sampling(BATCH), need_top_k=False, need_top_p=False, need_min_p=False)
    assert verification_matrices(plain, None, monkeypatch) < 0.05


def test_penalties_of_a_whole_batch_hold_nothing():
    """They come before verification and are not rehearsed. With end tokens, and a bias."""
    block, rows = torch.zeros(BATCH, BLOCK, dtype=torch.int64), torch.arange(BATCH)
    counts = torch.randint(0, 3, (BATCH, VOCABULARY), dtype=torch.int32)
    values = torch.tensor([[0.1, 0.2, 1.3]]).repeat(BATCH, 1)
    ends, earliest = torch.tensor([[1, 2]]).repeat(BATCH, 1), torch.full((BATCH,), 9)
    changes = Adjustments(counts, rows, values, ends, earliest, torch.randn(BATCH, VOCABULARY))
    logits = torch.randn(BATCH, BLOCK, VOCABULARY)
    expected = logits.clone()
    adjust_rows(expected, block, block, *changes.tensors)
    found = peak_bytes(lambda: adjust_kernel.launch(logits, block, block, *changes.tensors))
    assert torch.equal(logits, expected) and logits.isinf().any()
    assert found < 4 * BATCH * VOCABULARY / 50, found


def test_v4_flash_with_256_requests():
    """The numbers of the manual, from the published dimensions."""
    captured = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
    found = extra_device_memory(
        replace(SHAPE, requests=256, captured=captured, residual=4 * 4096, vocabulary=129_280)
    )
    gib = {name: size / 2**30 for name, size in found.items()}
    assert gib["residual of the captured batches"] == pytest.approx(0.055, abs=0.001)
    assert gib["verification of sampled requests"] == pytest.approx(2.80, abs=0.01)
    assert gib["counts of requests with penalties"] < 0.13 and gib["drafts' candidates"] < 0.01


def test_without_graphs_nothing_is_kept_for_them():
    found = extra_device_memory(replace(SHAPE, captured=[]))
    assert found["residual of the captured batches"] == found["drafts' candidates"] == 0


def test_all_sizes_share_one_residual_and_a_head_has_its_gates():
    one = extra_device_memory(SHAPE)
    more = extra_device_memory(replace(SHAPE, rank=16))
    name = "residual of the captured batches"
    assert one[name] == more[name] == 2 * 8 * 7 * 64
    assert more["drafts' candidates"] - one["drafts' candidates"] == 8 * 6 * 16 * 4


def test_a_draft_s_graph_projects_its_rows_at_once():
    """Found as: 0.4 GB at 256 requests that nobody had counted."""
    from sglang.srt.models.dflash import _project_candidate_logits

    drafts, hidden = BATCH * (BLOCK - 1), 16
    head = SimpleNamespace(weight=torch.randn(VOCABULARY, hidden, dtype=torch.bfloat16))
    rows = torch.randn(drafts, hidden, dtype=torch.bfloat16)

    def project() -> None:
        _project_candidate_logits(rows, head, num_org=VOCABULARY, use_quant_head=False)

    batches = replace(SHAPE, requests=BATCH, captured=[1, BATCH], vocabulary=VOCABULARY)
    counted = extra_device_memory(batches)["drafts' logits"]
    assert counted == 2 * drafts * VOCABULARY
    # A product on a CPU has some KiB of scratch.
    assert peak_bytes(project) == pytest.approx(counted, rel=0.01)
    shared = extra_device_memory(replace(batches, shards=8))["drafts' logits"]
    assert shared == 2 * drafts * VOCABULARY / 8
    assert extra_device_memory(replace(batches, captured=[]))["drafts' logits"] == 0


def test_forbidding_an_end_token_copies_no_logits():
    """Found as: two copies of every row of a batch, to change a few columns of it."""
    logits = torch.randn(BATCH, BLOCK, VOCABULARY)
    ends = torch.tensor([[1, 2], [3, -1], [4, 5]])
    block, positions = torch.zeros(2, BATCH, BLOCK, dtype=torch.int64)
    positions += 4 + torch.arange(BLOCK)
    changes = Adjustments(end_ids=ends, earliest=torch.full((BATCH,), 3 + 9))
    expected = logits.clone()
    for row, chosen in enumerate(ends.tolist()):
        # 2 tokens are out, and 8 after the last row.
        expected[row, :, [i for i in chosen if i >= 0]] = float("-inf")
    found = peak_bytes(lambda: adjust_rows(logits, block, positions, *changes.tensors))
    assert torch.equal(logits, expected)
    assert found < 4 * BATCH * VOCABULARY / 50, found
