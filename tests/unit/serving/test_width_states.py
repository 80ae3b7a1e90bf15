"""Swapping a worker from one width to another: what changes, what stays, what each width keeps."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.overrides import field_names
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs

from sglang_hyperdflash.serving import width_graphs, width_worker
from sglang_hyperdflash.serving.draft_temperature import DraftTemperature
from sglang_hyperdflash.serving.one_row import OneRowWorker
from sglang_hyperdflash.serving.pending_kv import PendingRows
from sglang_hyperdflash.serving.width.controller import WidthController
from sglang_hyperdflash.serving.width.costs import CostTable
from sglang_hyperdflash.serving.width.settings import WIDTHS as WIDTHS_VARIABLE
from sglang_hyperdflash.serving.width.settings import read_setting
from sglang_hyperdflash.serving.width_worker import (
    BUFFERS,
    SIZED,
    WidthStates,
    WidthWorker,
    check_ranks_agree,
)
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, SeamError

WIDTHS = (1, 2, 7)


class Worker:
    """The attributes of a ``DFlashWorkerV2`` of seven rows."""

    def __init__(self) -> None:
        for name in SIZED:
            setattr(self, name, None)
        vars(self).update(BUFFERS)
        self.device = "cpu"
        self.block_size = self.speculative_num_draft_tokens = 7
        self.other = object()
        self.target_worker = SimpleNamespace(model_runner=runner("target"))
        self.draft_model_runner = runner("draft")

    def _maybe_build_draft_sampler(self):
        return f"sampler of {self.block_size}"


def runner(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        attn_backend=f"{name} 7", decode_cuda_graph_runner=f"{name} graphs 7", eager_runner="eager"
    )


def building(backend: object, graphs: object, **more) -> SimpleNamespace:
    """A model runner with graphs of seven rows, of which another width's are built."""
    return SimpleNamespace(
        init_new_workspace=False,
        _get_attention_backend=lambda init_new_workspace: backend,
        decode_cuda_graph_runner="graphs of 7",
        eager_runner="eager",
        _decode_cuda_graph_runner_cls=lambda: graphs,
        kv_index_translator=SimpleNamespace(bind_and_verify_backends=lambda backends: None),
        **more,
    )


def test_the_worker_s_own_source_has_every_attribute_that_is_swapped():
    import inspect

    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    source = inspect.getsource(DFlashWorkerV2.__init__)
    assert [name for name in (*SIZED, *BUFFERS) if f"self.{name}" not in source] == []


def test_a_width_has_its_rows_and_its_own_buffers():
    worker = Worker()
    states = WidthStates(worker, WIDTHS)
    worker._draft_block_ids_buf = wide = torch.zeros(4, 7)
    states.activate(2)
    assert worker.block_size == worker.speculative_num_draft_tokens == 2
    assert worker._block_pos_offsets.tolist() == [0, 1]
    assert worker._draft_block_spec_info.draft_token_num == 2
    assert worker._draft_block_ids_buf is None
    worker._draft_block_ids_buf = narrow = torch.zeros(4, 2)
    states.activate(7)
    assert worker._draft_block_ids_buf is wide
    states.activate(2)
    assert worker._draft_block_ids_buf is narrow


def test_nothing_else_changes_and_the_same_width_changes_nothing():
    worker = Worker()
    states, other = WidthStates(worker, WIDTHS), worker.other
    before = dict(vars(worker))
    states.activate(7)
    assert vars(worker) == before
    states.activate(1)
    states.activate(7)
    assert worker.other is other and set(vars(worker)) == set(before)


@pytest.mark.parametrize("text", ["2", "1,2,4", "1,7", "7"])
def test_widths_that_are_planned_are_those_that_are_built(text):
    """Found as: a setting without the block was planned without the block's graphs."""
    setting = read_setting(7, causal=False, environment={WIDTHS_VARIABLE: text})
    assert setting.built(7) == tuple(sorted(WidthStates(Worker(), setting.widths).states))
    assert 7 in setting.built(7)


def test_an_attribute_that_sglang_lost_is_named():
    worker = Worker()
    del worker._draft_block_spec_info
    with pytest.raises(SeamError, match="_draft_block_spec_info"):
        WidthStates(worker, WIDTHS)


def test_ranks_of_different_widths_are_refused_on_every_rank():
    alike = read_setting(7, True, {"HYPERDFLASH_WIDTH": "adaptive"})
    check_ranks_agree(alike, lambda mine: [mine, mine])
    other = read_setting(7, True, {"HYPERDFLASH_WIDTH": "full"})
    for mine in (alike, other):
        with pytest.raises(HyperDFlashConfigError, match=r"rank 1: full of \(7,\)"):
            check_ranks_agree(mine, lambda _: [alike, other])


def test_every_width_gets_a_target_backend_and_drafting_ones_a_draft_backend(monkeypatch):
    built = []

    def state(kind: str):
        def build(worker, width, capture=True):
            assert worker.block_size == width
            built.append((kind, width, worker._draft_sampler, capture))
            return {"attn_backend": f"{kind} {width}", "decode_cuda_graph_runner": "some"}

        return build

    monkeypatch.setattr(width_graphs, "target_state", state("target"))
    monkeypatch.setattr(width_graphs, "draft_state", state("draft"))
    worker = Worker()
    # Width 1 is for a few requests only: a graph of it would not be worth its memory.
    states = WidthStates(worker, (2, 7), eager=(1,))
    worker._draft_sampler = "sampler of 7"
    states.build_runners()
    assert built == [
        ("target", 2, None, True),
        ("draft", 2, "sampler of 2", True),
        ("target", 1, None, False),
    ]
    target, draft = worker.target_worker.model_runner, worker.draft_model_runner
    assert (worker.block_size, worker._draft_sampler) == (7, "sampler of 7")
    assert (target.attn_backend, draft.attn_backend) == ("target 7", "draft 7")
    states.activate(2)
    assert (target.attn_backend, draft.attn_backend) == ("target 2", "draft 2")
    assert worker._draft_sampler == "sampler of 2"
    states.activate(1)
    assert target.attn_backend == "target 1" and worker._draft_sampler is None
    states.activate(7)
    assert (target.attn_backend, draft.attn_backend) == ("target 7", "draft 7")


def test_graphs_of_new_weights_are_captured_at_their_own_widths(monkeypatch):
    """SGLang captures with the backend that the runner has: a narrow one's, in a narrow round."""
    captures = []

    def state(kind: str):
        def build(worker, width, capture=True):
            # A width is built from the block's runner, as at the start.
            runner = worker.target_worker.model_runner
            captures.append((kind, width, runner.decode_cuda_graph_runner))
            graphs = f"{kind} graphs {width}, {weights[0]}" if capture else "eager"
            return {"attn_backend": f"{kind} {width}", "decode_cuda_graph_runner": graphs}

        return build

    def sglang(runner, name):
        def capture():
            captures.append((name, runner.attn_backend, worker.block_size))
            runner.decode_cuda_graph_runner = f"{name} graphs 7, {weights[0]}"

        return capture

    monkeypatch.setattr(width_graphs, "target_state", state("target"))
    monkeypatch.setattr(width_graphs, "draft_state", state("draft"))
    monkeypatch.setattr(width_graphs, "draft_pp_context", nullcontext)
    monkeypatch.setattr(width_graphs, "draft_tp_context", lambda layout: nullcontext())
    worker, weights = Worker(), ["old"]
    worker.draft_parallel_layout, worker._own_context = None, nullcontext
    target, draft = worker.target_worker.model_runner, worker.draft_model_runner
    draft.init_decode_cuda_graph = sglang(draft, "draft")
    target.weight_updater = WeightUpdater(
        recapture_cuda_graph=sglang(target, "target"),
        **dict.fromkeys(
            ("tp_rank", "device", "gpu_id", "model_config", "custom_weight_loaders", "get_model")
        ),
        update_model_fields=None,
        get_model_runner=None,
    )
    states = WidthStates(worker, (2, 7), eager=(1,))
    states.build_runners()
    width_graphs.on_recapture(target, states.capture_again)
    states.activate(2)
    weights[0] = "new"
    captures.clear()
    target.weight_updater.recapture_cuda_graph()
    graphs = "target graphs 7, new"
    assert captures == [
        ("target", "target 7", 7),
        ("draft", "draft 7", 7),
        ("target", 2, graphs),
        ("draft", 2, graphs),
        ("target", 1, graphs),
    ]
    for width in (2, 7):
        states.activate(width)
        assert (target.attn_backend, draft.attn_backend) == (f"target {width}", f"draft {width}")
        assert target.decode_cuda_graph_runner == f"target graphs {width}, new"
        assert draft.decode_cuda_graph_runner == f"draft graphs {width}, new"
    states.activate(1)
    assert target.decode_cuda_graph_runner == "eager"


def test_an_update_of_weights_still_calls_what_is_replaced():
    source = inspect.getsource(WeightUpdater.update_weights_from_disk)
    assert "self.recapture_cuda_graph()" in source
    assert "recapture_cuda_graph=self.recapture_decode_cuda_graph" in inspect.getsource(
        ModelRunner.init_weight_updater
    )
    with pytest.raises(SeamError, match="weight_updater changed"):
        width_graphs.on_recapture(SimpleNamespace(weight_updater=None), print)


def test_a_width_s_backend_is_built_under_its_number_of_rows(monkeypatch):
    """Backends and graph runners read the number from SGLang's settings."""
    from sglang.srt import runtime_context

    seen = []

    class Settings:
        speculative_num_draft_tokens, speculative_num_steps = 7, 1

        def override(self, **values):
            import contextlib

            @contextlib.contextmanager
            def change():
                self.speculative_num_draft_tokens = values["speculative_num_draft_tokens"]
                yield
                self.speculative_num_draft_tokens = 7

            return change()

    settings = Settings()
    assert hasattr(runtime_context, "get_spec")
    monkeypatch.setattr(width_graphs, "get_spec", lambda: settings)

    def backend(init_new_workspace):
        seen.append((init_new_workspace, settings.speculative_num_draft_tokens))
        return "new"

    def graphs(runner, **options):
        seen.append(options)
        return "graphs"

    target = SimpleNamespace(
        init_new_workspace=False,
        _get_attention_backend=backend,
        decode_cuda_graph_runner="graphs of 7",
        eager_runner="eager",
        _decode_cuda_graph_runner_cls=lambda: graphs,
        kv_index_translator=SimpleNamespace(bind_and_verify_backends=seen.append),
    )
    worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=target))
    found = width_graphs.target_state(worker, 2)
    assert found == {"attn_backend": "new", "decode_cuda_graph_runner": "graphs"}
    steps = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
    # The first backend's workspace, 384 MiB of FlashInfer's, not one more for every width.
    assert seen == [(False, 2), ["new"], {"attn_backend": "new", **steps}]
    # Without graphs, as on a CPU, a width runs as the whole block does.
    target.decode_cuda_graph_runner = "eager"
    found = width_graphs.target_state(worker, 2)
    assert found == {"attn_backend": "new", "decode_cuda_graph_runner": "eager"}
    assert settings.speculative_num_draft_tokens == 7


@pytest.mark.parametrize("free, found", [(1.4, "eager"), (1.5, "graphs of 2")])
def test_a_width_without_memory_for_a_graph_verifies_without_one(monkeypatch, caplog, free, found):
    """SGLang keeps memory for one width's graphs: as much once more, and 1 GB, must be left."""
    taken = {"prefill": 0.1, "target_verify": 0.4}
    target = building("backend", lambda runner, **options: "graphs of 2", graph_memory_usage=taken)
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target),
        device="cuda",
        gpu_id=0,
        _tp_sync=SimpleNamespace(available_memory_gb=lambda *a, **k: free),
    )
    monkeypatch.setattr(width_graphs, "get_spec", lambda: SimpleNamespace(speculative_num_steps=1))
    monkeypatch.setattr(width_graphs, "_settings", lambda width: nullcontext())
    ranks = SimpleNamespace(world_size=1)
    monkeypatch.setattr(width_graphs, "get_parallel", lambda: SimpleNamespace(tp_group=ranks))
    monkeypatch.setattr(width_graphs, "is_cuda", lambda: True)
    assert width_graphs.target_state(worker, 2)["decode_cuda_graph_runner"] == found
    said = "width 2 verifies without a CUDA graph: 1.40 GB" in caplog.text
    assert said == (found == "eager")
    # Ranks agree: the one whose graphs took the most decides for all.
    ranks.world_size, ranks.all_gather_object = 2, lambda own: [own, own + 0.1]
    assert width_graphs.target_state(worker, 2)["decode_cuda_graph_runner"] == "eager"


def test_a_narrow_draft_s_indices_hold_what_a_wide_round_left_behind(monkeypatch):
    """A finished request runs once more, after a round of seven rows too."""
    sizes = []

    class TritonAttnBackend:
        max_context_len, device = 100, "cpu"

        def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
            sizes.append(len(kv_indices_buf))

    def graphs(runner, *, attn_backend, **options):
        attn_backend.init_cuda_graph_state(4, 8)
        return "graphs"

    draft = building(TritonAttnBackend(), graphs, capture_tail_hooks=[])
    worker = SimpleNamespace(
        draft_model_runner=draft,
        block=7,
        _draft_sampler=None,
        _own_context=nullcontext,
        draft_parallel_layout=None,
    )
    settings = SimpleNamespace(speculative_num_steps=1)
    monkeypatch.setattr(width_graphs, "get_spec", lambda: settings)
    monkeypatch.setattr(width_graphs, "_settings", lambda width: nullcontext())
    monkeypatch.setattr(width_graphs, "draft_tp_context", lambda layout: nullcontext())
    assert width_graphs.draft_state(worker, 2)["decode_cuda_graph_runner"] == "graphs"
    assert sizes == [4 * (100 + 3 * 7)]


@pytest.mark.parametrize(
    "free, cuda, graph", [(0.9, True, False), (1.0, True, True), (0.9, False, True)]
)
def test_a_width_without_memory_for_a_graph_drafts_without_one(
    monkeypatch, caplog, free, cuda, graph
):
    """SGLang asks so of the whole block's; a narrow one's capture would have ended the server."""
    hooks, asked = [], []

    def graphs(runner, **options):
        hooks.append(len(runner.capture_tail_hooks))
        return "graphs of 2"

    draft = building(
        "backend", graphs, capture_tail_hooks=["the whole block's"], graph_memory_usage={}
    )
    worker = SimpleNamespace(
        draft_model_runner=draft,
        block=7,
        device="cuda",
        gpu_id=0,
        _draft_sampler=lambda *a, **k: None,
        _own_context=nullcontext,
        draft_parallel_layout=None,
        _tp_sync=SimpleNamespace(available_memory_gb=lambda *a, **k: asked.append(k) or free),
    )
    monkeypatch.setattr(width_graphs, "get_spec", lambda: SimpleNamespace(speculative_num_steps=1))
    monkeypatch.setattr(width_graphs, "_settings", lambda width: nullcontext())
    monkeypatch.setattr(width_graphs, "draft_tp_context", lambda layout: nullcontext())
    ranks = SimpleNamespace(world_size=1)
    monkeypatch.setattr(width_graphs, "get_parallel", lambda: SimpleNamespace(tp_group=ranks))
    monkeypatch.setattr(width_graphs, "is_cuda", lambda: cuda)
    found = width_graphs.draft_state(worker, 2)
    runner = "graphs of 2" if graph else "eager"
    assert found == {"attn_backend": "backend", "decode_cuda_graph_runner": runner}
    # Its sampler lives in the graph; without one the worker projects the rows itself.
    assert (worker._draft_sampler is not None) == graph and hooks == ([1] if graph else [])
    assert draft.capture_tail_hooks == ["the whole block's"]
    assert asked == ([{"group": ranks}] if cuda else [])
    assert ("width 2 drafts without a CUDA graph: 0.90 GB" in caplog.text) == (not graph)


def test_sglang_s_own_check_of_a_draft_graph_is_the_same():
    import inspect

    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    source = inspect.getsource(DFlashWorkerV2.init_cuda_graphs)
    assert f"available_mem < {width_graphs.LEAST_FREE}" in source
    assert "SpecTpSyncSite.DFLASH_MEM" in source and "get_parallel().tp_group" in source


@pytest.mark.parametrize("which", ["none", "attention", "overlap", "role", "states"])
def test_what_keeps_every_round_at_the_block(monkeypatch, which):
    """Found as: with two-batch overlap a narrow width's capture ended the start."""
    attention = SimpleNamespace(attn_dp_enabled=which == "attention")
    overlap = SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=which == "overlap"))
    role = SimpleNamespace(enable_pd_role_switch=which == "role")
    monkeypatch.setattr(width_worker, "get_parallel", lambda: attention)
    monkeypatch.setattr(width_worker, "get_exec", lambda: overlap)
    monkeypatch.setattr(width_worker, "get_disagg", lambda: role)
    states = "a config" if which == "states" else None
    monkeypatch.setattr(width_worker, "mambaish_config", lambda config: states)
    worker = object.__new__(WidthWorker)
    worker.block, worker._target_worker = 7, SimpleNamespace(model_runner=SimpleNamespace())
    worker._target_worker.model_runner.model_config = None
    adaptive = read_setting(7, True, {"HYPERDFLASH_WIDTH": "adaptive"})
    widths = (1, 2, 4, 7) if which == "none" else (7,)
    assert worker._allowed(adaptive).widths == widths
    fields = {"enable_two_batch_overlap", "enable_pd_role_switch"}
    assert fields <= set(field_names(ServerArgs))


def test_a_batch_with_notes_has_rounds_of_one_row_and_others_keep_theirs(monkeypatch):
    """Whatever the server's widths are; a batchmate without notes goes along."""
    monkeypatch.setattr(OneRowWorker, "run_round", lambda worker, batch: "block")
    worker = object.__new__(WidthWorker)
    asked = []
    worker.width_control = SimpleNamespace(
        next=lambda *classes: asked.append("next") or 7,
        setting=SimpleNamespace(fixed=True),
    )
    worker.block, worker.requests, worker._pending_of = 7, SimpleNamespace(classes=(1, 1)), None
    worker.requests.reqs = [SimpleNamespace(kv=SimpleNamespace(kv_committed_len=20))]
    worker._pending, worker._rounds_width, worker.window, widths = PendingRows(0), 7, None, []
    worker._states = SimpleNamespace(activate=widths.append)
    worker.one_row_round = lambda batch: "one row"
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, extend_num_tokens=None)
    worker._info = SimpleNamespace(has_custom_logit_processor=True)
    worker._has_one_row = worker._overlap = True
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=100))
    worker._target_worker = SimpleNamespace(model_runner=runner)
    assert worker.run_round(batch) == "one row" and widths == [1] and asked == []
    worker._info = SimpleNamespace(has_custom_logit_processor=False)
    assert worker.run_round(batch) == "block" and widths == [1, 7] and asked == ["next"]


@pytest.mark.parametrize(
    ("setting", "node", "timed"),
    [
        ({}, "null", True),
        ({}, "decode", True),
        ({}, "prefill", False),
        ({"HYPERDFLASH_WIDTH": "4"}, "null", False),
        ({"HYPERDFLASH_WIDTH": "random"}, "null", False),
    ],
)
def test_only_an_adaptive_server_that_decodes_times_its_rounds(monkeypatch, setting, node, timed):
    worker = object.__new__(WidthWorker)
    worker.width_control = WidthController(read_setting(7, False, setting), 7)
    worker.server_args = SimpleNamespace(disaggregation_mode=node)
    worker.block, worker.window, worker._pending = 7, None, PendingRows(10)
    learned, widths = DraftTemperature("cpu", fixed=0.5), []
    worker.draft_temperature, worker.device = learned, "cpu"
    worker._states = SimpleNamespace(activate=widths.append)
    group = SimpleNamespace(world_size=2, broadcast_object=lambda row, src: [src, *row])
    monkeypatch.setattr(width_worker, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    costs = CostTable((1, 7))
    costs.add(1, [1.0, 2.0, 1.0, 2.0])

    def time_rounds(worker, control, share):
        assert share([3.0]) == [0, 3.0]  # rank 0's
        worker.requests = "made-up requests"
        return costs

    monkeypatch.setattr(width_worker, "time_rounds", time_rounds)
    worker._time_rounds()
    assert worker.width_control.costs is (costs if timed else None)
    assert widths == ([7] if timed else [])
    if timed:
        assert worker.requests is None and worker.draft_temperature is not learned
        assert worker.draft_temperature.fixed == 0.5
