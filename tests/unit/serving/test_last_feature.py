"""The last feature of each request: whose row it is, after every kind of pass."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.fusion import FeatureFusion
from sglang_hyperdflash.serving.last_feature import LastFeatureWorker, fused, last_rows
from sglang_hyperdflash.serving.window_worker import WindowedWorker

D, SLOTS = 4, 6


class DraftModel:
    fusion = FeatureFusion(D, 1e-6)

    def __init__(self) -> None:
        self.last_features = torch.zeros(SLOTS, D)

    def project_target_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 10


@pytest.fixture
def worker(monkeypatch):
    """The part of a worker that keeps features; draft K/V go nowhere."""
    written = []

    def append(_self, **rows) -> None:
        written.append(rows)

    monkeypatch.setattr(WindowedWorker, "_append_target_hidden_to_draft_kv_by_loc", append)

    def build(mode: str = "null", model: type | None = DraftModel) -> LastFeatureWorker:
        def start(self, *_inputs) -> None:
            self.draft_model, self.device = model() if model else SimpleNamespace(), "cpu"

        with mock.patch.object(WindowedWorker, "__init__", start):
            made = LastFeatureWorker(SimpleNamespace(disaggregation_mode=mode), 0, 0, None)
        made.written = written
        return made

    return build


def rows(count: int) -> torch.Tensor:
    """Row i holds i."""
    return torch.arange(float(count)).unsqueeze(1).expand(count, D)


def kept(worker: LastFeatureWorker) -> list[float]:
    return worker.draft_model.last_features[:, 0].tolist()


def test_last_rows_of_blocks_and_of_prompts():
    assert last_rows(torch.tensor([1, 3, 2]), 7).tolist() == [0, 9, 15]
    assert last_rows(torch.tensor([1, 3, 2]), None).tolist() == [0, 3, 5]


def test_a_round_keeps_the_last_committed_row_of_each_request(worker):
    made = worker()
    made._rows = torch.tensor([4, 1])
    made._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=rows(6),
        cache_loc=torch.arange(6),
        cache_loc_2d=torch.arange(6).view(2, 3),
        commit_lens=torch.tensor([2, 3], dtype=torch.int32),
    )
    assert kept(made) == [0, 50, 0, 0, 10, 0]
    assert len(made.written) == 1 and "req_slots" not in made.written[0]


def test_a_prefill_keeps_the_last_row_of_each_request_and_no_padding(worker):
    made = worker()
    made._rows = torch.tensor([2, 5])
    made._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=rows(8),
        cache_loc=torch.arange(7),
        extend_lens=torch.tensor([4, 3], dtype=torch.int32),
    )
    assert kept(made) == [0, 0, 30, 0, 0, 60]


@pytest.mark.parametrize("window", [False, True])
def test_rounds_without_drafts_keep_the_last_of_them(worker, window):
    """Two rounds of three requests, written at once; this pass is of others."""
    made = worker()
    made._rows = torch.tensor([0])
    extra = {}
    if window:
        extra["cache_loc_2d"] = torch.arange(6).unsqueeze(1)
        extra["commit_lens"] = torch.ones(6, dtype=torch.int32)
    made._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=rows(6),
        cache_loc=torch.arange(6),
        req_slots=torch.tensor([3, 1, 2]),
        **extra,
    )
    assert kept(made) == [0, 40, 50, 30, 0, 0]


def test_a_drafter_without_fusion_keeps_nothing(worker):
    made = worker(model=None)
    made._append_target_hidden_to_draft_kv_by_loc(target_hidden=rows(2), req_slots=None)
    assert len(made.written) == 1


def test_a_request_that_arrives_on_a_decode_node_has_no_feature_yet(worker, monkeypatch):
    class Request(SimpleNamespace):
        __hash__ = object.__hash__

    monkeypatch.setattr(WindowedWorker, "forward_batch_generation", lambda *_inputs: "done")
    made = worker("decode")
    features = made.draft_model.last_features
    features.fill_(1)
    first = Request(kv=SimpleNamespace(req_pool_idx=2), retraction_count=0)
    batch = SimpleNamespace(reqs=[first])
    assert made.forward_batch_generation(batch) == "done"
    assert kept(made) == [1, 1, 0, 1, 1, 1]
    features.fill_(1)
    made.forward_batch_generation(batch)
    assert kept(made) == [1] * 6, "a request that goes on keeps its own"
    first.retraction_count = 1  # it comes back from a backup
    made.forward_batch_generation(batch)
    assert kept(made) == [1, 1, 0, 1, 1, 1]
    plain = worker()
    plain.draft_model.last_features.fill_(1)
    plain.forward_batch_generation(batch)
    assert kept(plain) == [1] * 6


@torch.no_grad()
def test_every_row_of_a_block_starts_at_its_requests_feature():
    torch.manual_seed(0)
    fusion, embeddings, features = FeatureFusion(D, 1e-6), torch.randn(7, D), torch.randn(2, D)
    found = fused(fusion, embeddings, features, 3)
    for row in range(6):
        request = row // 3
        added = fusion(embeddings[3 * request], features[request])
        torch.testing.assert_close(found[row], embeddings[row] + added)
    assert torch.equal(found[6], embeddings[6]), "a row of padding"
