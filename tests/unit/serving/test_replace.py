"""New weights in place: what is derived from them is rebuilt where captured graphs read it."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.models.dflash import DFlashDraftModel
from torch import nn

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.serving import worker as worker_module
from sglang_hyperdflash.serving.drafting.copies import CopyHistory
from sglang_hyperdflash.serving.drafting.model import HyperDFlashDraftModel
from sglang_hyperdflash.serving.drafting.replace import rebuild
from sglang_hyperdflash.serving.settings import WidthSetting
from sglang_hyperdflash.serving.width.policy import WidthController
from sglang_hyperdflash.serving.worker import HyperDFlashWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.conftest import EXAMPLE
from tests.unit.cpu.platform.test_draft_kv import helper, layer, rope_of
from tests.unit.other_process import ask

pytestmark = pytest.mark.heavy

DRAFTER = EXAMPLE / "drafter"
DERIVED = ["flat_kv_weight_t", "k_norm_weights"]


def served() -> SimpleNamespace:
    """A worker that has learnt something of its drafter."""
    layers = [layer(rope_of()) for _ in range(3)]
    control = WidthController(WidthSetting("adaptive", (1, 7)), 7)
    control.policy.observe(7, [6, 0], [3])
    history = CopyHistory(2, 64, 7, 100, "cpu")
    history.copies.counts.fill_(3)
    return SimpleNamespace(
        device="cpu",
        model_runner=SimpleNamespace(forward_stream=torch.cpu.Stream()),
        draft_model=SimpleNamespace(layers=layers),
        width_control=control,
        history=history,
        rounds=[SimpleNamespace(observed=True)],
        _fused_kv_helper=helper(layers),
    )


def test_what_comes_of_the_weights_is_that_of_a_new_worker_at_its_old_address():
    """All that SGLang's helper derives, and what was learnt of the old drafter."""
    worker, fresh = served(), WidthController(WidthSetting("adaptive", (1, 7)), 7).policy
    derived, old = worker._fused_kv_helper, helper(worker.draft_model.layers)
    before = [getattr(derived, name).data_ptr() for name in DERIVED]
    with HyperDFlashWorker._replacing_weights(worker):
        for each in worker.draft_model.layers:
            each.self_attn.qkv_proj.weight.data.normal_()
            each.self_attn.k_norm.weight.data.normal_()
    new = helper(worker.draft_model.layers)
    made_of_tensors = [n for n, value in vars(new).items() if isinstance(value, torch.Tensor)]
    differ = [n for n in made_of_tensors if not torch.equal(getattr(new, n), getattr(old, n))]
    assert sorted(differ) == DERIVED
    assert all(torch.equal(getattr(derived, n), getattr(new, n)) for n in made_of_tensors)
    assert [getattr(derived, name).data_ptr() for name in DERIVED] == before
    learnt = worker.width_control.policy
    assert list(map(vars, learnt.classes)) == list(map(vars, fresh.classes))
    assert not worker.rounds[0].observed, "the old drafter's"
    assert not worker.history.copies.counts.any()
    # Without SGLang's fused write nothing is derived.
    rebuild(None, worker.draft_model.layers)


def test_nothing_is_replaced_before_every_tensor_is_checked(monkeypatch):
    loaded, tensors = [], load_file(DRAFTER / "model.safetensors")
    monkeypatch.setattr(DFlashDraftModel, "load_weights", lambda self, sent: loaded.extend(sent))
    model = object.__new__(HyperDFlashDraftModel)
    nn.Module.__init__(model)
    model.raw_config = json.loads((DRAFTER / "config.json").read_text())
    model.hyperdflash_config, model.norm = load_config(DRAFTER), nn.LayerNorm(1)
    model.replacing = None
    model.load_weights(tensors.items())
    model.replacing = Mock(side_effect=nullcontext)
    some = {name: tensors[name] for name in sorted(tensors)[:7]}
    for name in ("other", "norm.weight"):
        with pytest.raises(HyperDFlashConfigError, match=name):
            model.load_weights((some | {name: torch.ones(2)}).items())
    assert dict(loaded).keys() == tensors.keys() and len(loaded) == len(tensors)
    model.load_weights(some.items())
    assert {name for name, _ in loaded[len(tensors) :]} == set(some)
    assert model.replacing.call_count == 1, "between two rounds"


def test_copies_come_after_the_round_that_runs_and_before_the_next(monkeypatch):
    """With overlap scheduling that round is on a stream of its own."""
    worker, order = served(), Mock()
    worker.model_runner.forward_stream = order.rounds
    module = SimpleNamespace(current_stream=lambda: order.schedule, stream=lambda _: nullcontext())
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(worker_module, "rebuild", order.rebuild)
    with HyperDFlashWorker._replacing_weights(worker):
        order.copy()
    copied = [call.copy(), call.rebuild(worker._fused_kv_helper, worker.draft_model.layers)]
    first, last = call.rounds.wait_stream(order.schedule), call.schedule.wait_stream(order.rounds)
    assert order.mock_calls == [first, *copied, last]


@pytest.mark.slow
def test_the_draft_model_s_weights_keep_their_addresses():
    """Captured graphs read them there."""
    told = ask("tests.unit.serving.draft_weights", None)
    assert told["doubled"] and told["in place"] and 0 < told["partly"] <= 7
