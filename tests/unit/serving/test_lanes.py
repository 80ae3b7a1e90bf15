"""Lanes: what of the model runners changes with the width, and what each width is built with."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.arg_groups.overrides import field_names
from sglang.srt.server_args import ServerArgs

from sglang_hyperdflash.serving import runners as runners_module
from sglang_hyperdflash.serving import worker as worker_module
from sglang_hyperdflash.serving.settings import WIDTHS, read_width
from sglang_hyperdflash.serving.width import lanes as lanes_module
from sglang_hyperdflash.serving.width.lanes import Lanes
from sglang_hyperdflash.serving.worker import width_1_impossible

BLOCK = 7


class Runner:
    """A model runner with backends and graphs of seven rows."""

    init_new_workspace, eager_runner = False, "eager"

    def __init__(self, name: str, settings: SimpleNamespace) -> None:
        self.name, self.settings = name, settings
        self.attn_backend = f"{name} backend 7"
        self.decode_cuda_graph_runner = f"{name} graphs 7"
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
def runners(monkeypatch):
    """Those of a block of seven, with graphs, with 9 GB of free memory."""
    # SGLang's resolved settings, as backends and graph runners read them.
    settings = SimpleNamespace(speculative_num_draft_tokens=BLOCK, speculative_num_steps=1)
    settings.override = partial(mock.patch.multiple, settings)
    ranks = SimpleNamespace(world_size=1)
    monkeypatch.setattr(lanes_module, "get_spec", lambda: settings)
    parallel = SimpleNamespace(tp_group=ranks)
    monkeypatch.setattr(runners_module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(lanes_module, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(lanes_module, "is_cuda", lambda: True)
    models = {name: Runner(name, settings) for name in ("target", "draft")}
    device = {"block": BLOCK, "device": "cpu", "gpu_id": 0, "draft_layout": None}
    made = SimpleNamespace(free=9.0, ranks=ranks, **device, **models)
    monkeypatch.setattr(lanes_module, "get_available_gpu_memory", lambda *_: made.free)
    return made


OF_BLOCK = SimpleNamespace(ids=range(32))  # what the draft's graphs of the block write


def built(runners, widths: tuple[int, ...], eager: tuple[int, ...] = ()) -> Lanes:
    lanes = Lanes(runners, "buffers of {} x {}".format, nullcontext, widths, eager)
    lanes.build(OF_BLOCK)
    return lanes


def running(runners) -> tuple[str, ...]:
    """Backend and graphs of the target, then of the drafter."""
    models = runners.target, runners.draft
    return sum(((each.attn_backend, each.decode_cuda_graph_runner) for each in models), ())


def test_every_width_has_a_target_lane_and_drafting_ones_a_draft_lane(runners):
    # Width 1 is for a few requests only: a graph of it would not be worth its memory.
    lanes = built(runners, (2, 7), eager=(1,))
    whole = ("target backend 7", "target graphs 7", "draft backend 7", "draft graphs 7")
    assert lanes.active.width == 7 and running(runners) == whole
    two = lanes.activate(2)
    narrow = ("target backend 2", "target graphs 2", "draft backend 2", "draft graphs 2")
    assert running(runners) == narrow
    assert two.draft_buffers == "buffers of 2 x 32" and two.spec_info.draft_token_num == 2
    one = lanes.activate(1)
    assert running(runners) == ("target backend 1", "eager", *narrow[2:])
    assert one.draft_buffers is None
    seven = lanes.activate(7)
    assert running(runners) == whole and seven.draft_buffers is OF_BLOCK
    target, draft = runners.target, runners.draft
    assert target.bound == ["target backend 2", "target backend 1"]
    assert draft.bound == ["draft backend 2"]
    # The draft's graph of a width holds that width's head alone, the target's the shared hooks.
    assert target.captures == [("target backend 2", 1)] and len(draft.captures) == 1
    assert draft.capture_tail_hooks == ["hook of the whole draft block"]
    # Where the policy chooses width 1, it has a graph.
    built(runners, (1, 7), eager=(1,)).activate(1)
    assert running(runners)[:2] == ("target backend 1", "target graphs 1")


@pytest.mark.parametrize("free, more, graph", [(1.4, 0, False), (1.5, 0, True), (1.5, 0.1, False)])
def test_a_width_without_memory_for_a_graph_runs_without_one(runners, free, more, graph):
    """As much as the block's graphs took, and 1 GB, must be left; the worst rank decides."""
    runners.free, runners.ranks.world_size = free, 2
    runners.ranks.all_gather_object = lambda taken: [taken, taken + more]
    lane = built(runners, (2, 7)).activate(2)
    found = ("target graphs 2", "draft graphs 2") if graph else ("eager", "eager")
    assert running(runners)[1::2] == found
    # Its candidates live in the graph; without one the drafter projects the rows itself.
    assert (lane.draft_buffers is not None) == graph


def test_a_narrow_draft_s_indices_hold_what_a_wide_round_left(runners):
    """A finished request runs once more, after a round of seven rows too."""
    sizes = []

    class TritonAttnBackend:
        max_context_len, device = 100, "cpu"

        def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
            sizes.append(len(kv_indices_buf))

    draft = runners.draft
    draft._get_attention_backend = lambda init_new_workspace: TritonAttnBackend()
    draft._decode_cuda_graph_runner_cls = lambda: (
        lambda runner, attn_backend, **options: attn_backend.init_cuda_graph_state(4, 8)
    )
    built(runners, (2, 7))
    assert sizes == [4 * (100 + 3 * 7)]


@pytest.mark.parametrize("text", ["1,2,4", "7"])
def test_widths_that_are_planned_are_those_that_are_built(runners, text):
    """The block's are, whether the setting names it or not."""
    setting = read_width(7, causal=False, environment={WIDTHS: text})
    assert setting.built(7) == tuple(sorted(built(runners, setting.widths)._lanes))


@pytest.mark.parametrize("which", ["none", "attention", "overlap"])
def test_what_keeps_rounds_from_one_row(monkeypatch, which):
    attention = SimpleNamespace(attn_dp_enabled=which == "attention")
    overlap = SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=which == "overlap"))
    monkeypatch.setattr(worker_module, "get_parallel", lambda: attention)
    monkeypatch.setattr(worker_module, "get_exec", lambda: overlap)
    assert width_1_impossible() == (which != "none")
    assert "enable_two_batch_overlap" in field_names(ServerArgs)
