"""Lanes: what of the model runners changes with the width, and what each width is built with."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.overrides import field_names
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_hyperdflash.serving import worker as worker_module
from sglang_hyperdflash.serving.width import lanes as lanes_module
from sglang_hyperdflash.serving.width.lanes import Lanes
from sglang_hyperdflash.serving.width.settings import WIDTHS as WIDTHS_VARIABLE
from sglang_hyperdflash.serving.width.settings import read_setting
from sglang_hyperdflash.serving.worker import whole_blocks_only

BLOCK = 7


class Settings:
    """SGLang's resolved settings, as backends and graph runners read them."""

    speculative_num_draft_tokens, speculative_num_steps = BLOCK, 1

    @contextlib.contextmanager
    def override(self, **values):
        self.speculative_num_draft_tokens = values["speculative_num_draft_tokens"]
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = BLOCK


class Runner:
    """A model runner with backends, and graphs unless ``graphs`` is False, of seven rows."""

    init_new_workspace, eager_runner = False, "eager"

    def __init__(self, name: str, settings: Settings, graphs: bool = True) -> None:
        self.name, self.settings = name, settings
        self.attn_backend = f"{name} backend 7"
        self.decode_cuda_graph_runner = f"{name} graphs 7" if graphs else "eager"
        self.capture_tail_hooks = [f"hook of the whole {name} block"]
        self.graph_memory_usage = {"prefill": 0.1, "target_verify": 0.4}
        self.bound, self.captures = [], []
        self.kv_index_translator = SimpleNamespace(bind_and_verify_backends=self.bound.extend)

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        # FlashInfer's workspace, 384 MiB, is the first backend's, not one more for every width.
        assert init_new_workspace is False
        return f"{self.name} backend {self.settings.speculative_num_draft_tokens}"

    def _decode_cuda_graph_runner_cls(self):
        def capture(runner, *, attn_backend, speculative_num_steps, speculative_num_draft_tokens):
            assert runner is self
            assert speculative_num_draft_tokens == self.settings.speculative_num_draft_tokens
            self.captures.append((attn_backend, len(self.capture_tail_hooks)))
            return f"{self.name} graphs {speculative_num_draft_tokens}"

        return capture


@pytest.fixture
def worker(monkeypatch):
    """A worker of a block of seven whose runners have graphs, on a device with free memory."""
    settings = Settings()
    ranks = SimpleNamespace(world_size=1)
    monkeypatch.setattr(lanes_module, "get_spec", lambda: settings)
    monkeypatch.setattr(lanes_module, "get_parallel", lambda: SimpleNamespace(tp_group=ranks))
    monkeypatch.setattr(lanes_module, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(lanes_module, "is_cuda", lambda: True)
    found = SimpleNamespace(
        block=BLOCK,
        device="cpu",
        gpu_id=0,
        free=9.0,
        ranks=ranks,
        _draft_sampler=SimpleNamespace(ids=range(32)),
        draft_parallel_layout=None,
        draft_kv=SimpleNamespace(build_context=nullcontext),
        drafter=SimpleNamespace(
            buffers=lambda width, most: SimpleNamespace(name=f"buffers of {width} x {most}")
        ),
        target_worker=SimpleNamespace(model_runner=Runner("target", settings)),
        draft_model_runner=Runner("draft", settings),
    )
    found._tp_sync = SimpleNamespace(available_memory_gb=lambda *a, **k: found.free)
    return found


def running(worker) -> tuple[str, str, str, str]:
    target, draft = worker.target_worker.model_runner, worker.draft_model_runner
    found = (target.attn_backend, target.decode_cuda_graph_runner)
    return (*found, draft.attn_backend, draft.decode_cuda_graph_runner)


def test_every_width_has_a_target_lane_and_drafting_ones_a_draft_lane(worker):
    # Width 1 is for a few requests only: a graph of it would not be worth its memory.
    lanes = Lanes(worker, (2, 7), eager=(1,))
    lanes.build()
    whole = ("target backend 7", "target graphs 7", "draft backend 7", "draft graphs 7")
    assert lanes.active.width == 7 and running(worker) == whole
    two = lanes.activate(2)
    narrow = ("target backend 2", "target graphs 2", "draft backend 2", "draft graphs 2")
    assert running(worker) == narrow
    assert two.candidates.name == "buffers of 2 x 32" and two.spec_info.draft_token_num == 2
    one = lanes.activate(1)
    assert running(worker) == ("target backend 1", "eager", *narrow[2:])
    assert one.candidates is None
    seven = lanes.activate(7)
    assert running(worker) == whole and seven.candidates is worker._draft_sampler
    assert lanes.activate(7) is seven
    target, draft = worker.target_worker.model_runner, worker.draft_model_runner
    assert target.bound == ["target backend 2", "target backend 1"]
    assert draft.bound == ["draft backend 2"]
    # The draft's graph of a width holds that width's head alone, the target's the shared hooks.
    assert target.captures == [("target backend 2", 1)] and len(draft.captures) == 1
    assert draft.capture_tail_hooks == ["hook of the whole draft block"]


def test_width_1_has_a_graph_where_the_policy_chooses_it(worker):
    lanes = Lanes(worker, (1, 7), eager=(1,))
    lanes.build()
    lanes.activate(1)
    assert running(worker)[:2] == ("target backend 1", "target graphs 1")


def test_without_graphs_every_width_runs_eagerly(worker):
    """As on a CPU."""
    settings = worker.target_worker.model_runner.settings
    worker.target_worker.model_runner = Runner("target", settings, graphs=False)
    worker.draft_model_runner, worker._draft_sampler = Runner("draft", settings, False), None
    lanes = Lanes(worker, (1, 2, 7))
    lanes.build()
    for width in (1, 2, 7):
        lane = lanes.activate(width)
        assert running(worker)[1::2] == ("eager", "eager") and lane.candidates is None
    assert worker.target_worker.model_runner.captures == []


@pytest.mark.parametrize("free, graph", [(1.4, False), (1.5, True)])
def test_a_width_without_memory_for_a_graph_runs_without_one(worker, caplog, free, graph):
    """SGLang keeps memory for one width's graphs: as much once more, and 1 GB, must be left."""
    worker.free = free
    lanes = Lanes(worker, (2, 7))
    lanes.build()
    lane = lanes.activate(2)
    found = ("target graphs 2", "draft graphs 2") if graph else ("eager", "eager")
    assert running(worker)[1::2] == found
    # Its candidates live in the graph; without one the drafter projects the rows itself.
    assert (lane.candidates is not None) == graph
    for doing in ("verifies", "drafts"):
        assert (f"width 2 {doing} without a CUDA graph: 1.40 GB" in caplog.text) == (not graph)


def test_the_rank_whose_graphs_took_the_most_decides_for_all(worker):
    worker.free, worker.ranks.world_size = 1.5, 2
    worker.ranks.all_gather_object = lambda own: [own, own + 0.1]
    lanes = Lanes(worker, (2, 7))
    lanes.build()
    lanes.activate(2)
    assert running(worker)[1::2] == ("eager", "eager")


def test_a_narrow_draft_s_indices_hold_what_a_wide_round_left(worker, monkeypatch):
    """A finished request runs once more, after a round of seven rows too."""
    sizes = []

    class TritonAttnBackend:
        max_context_len, device = 100, "cpu"

        def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
            sizes.append(len(kv_indices_buf))

    def capture(runner, *, attn_backend, **options):
        attn_backend.init_cuda_graph_state(4, 8)
        return "graphs"

    draft = worker.draft_model_runner
    draft._get_attention_backend = lambda init_new_workspace: TritonAttnBackend()
    draft._decode_cuda_graph_runner_cls = lambda: capture
    Lanes(worker, (2, 7)).build()
    assert sizes == [4 * (100 + 3 * 7)]


@pytest.mark.parametrize("text", ["2", "1,2,4", "1,7", "7"])
def test_widths_that_are_planned_are_those_that_are_built(worker, text):
    """Found as: a setting without the block was planned without the block's graphs."""
    setting = read_setting(7, causal=False, environment={WIDTHS_VARIABLE: text})
    lanes = Lanes(worker, setting.widths)
    lanes.build()
    assert setting.built(7) == tuple(sorted(lanes._lanes))


def test_sglang_s_own_check_of_a_draft_graph_is_the_same():
    source = inspect.getsource(DFlashWorkerV2.init_cuda_graphs)
    assert f"available_mem < {lanes_module.LEAST_FREE}" in source
    assert "SpecTpSyncSite.DFLASH_MEM" in source and "get_parallel().tp_group" in source


@pytest.mark.parametrize("which", ["none", "attention", "overlap", "role"])
def test_what_keeps_every_round_at_the_block(monkeypatch, which):
    """Found as: with two-batch overlap a narrow width's capture ended the start."""
    attention = SimpleNamespace(attn_dp_enabled=which == "attention")
    overlap = SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=which == "overlap"))
    role = SimpleNamespace(enable_pd_role_switch=which == "role")
    monkeypatch.setattr(worker_module, "get_parallel", lambda: attention)
    monkeypatch.setattr(worker_module, "get_exec", lambda: overlap)
    monkeypatch.setattr(worker_module, "get_disagg", lambda: role)
    assert whole_blocks_only() == (which != "none")
    fields = {"enable_two_batch_overlap", "enable_pd_role_switch"}
    assert fields <= set(field_names(ServerArgs))
