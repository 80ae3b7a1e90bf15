"""New weights in place: what is derived from them is rebuilt where captured graphs read it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper
from torch import nn

from sglang_hyperdflash.serving.drafting import replace
from sglang_hyperdflash.serving.drafting.replace import in_own_memory, rebuild, replacing
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.width.policy import WidthController
from sglang_hyperdflash.serving.width.settings import WidthSetting
from tests.unit.serving import draft_weights

HEADS, KV_HEADS, DIM, WIDTH, LAYERS = 4, 2, 8, 24, 3


def layer() -> SimpleNamespace:
    """As far as SGLang's helper and ``rebuild`` read it; more rows than heads, as padding."""
    rows = (HEADS + 2 * KV_HEADS) * DIM + 5
    attention = SimpleNamespace(
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        q_size=HEADS * DIM,
        kv_size=KV_HEADS * DIM,
        rotary_emb=SimpleNamespace(
            rotary_dim=DIM, is_neox_style=True, cos_sin_cache=torch.zeros(4, DIM)
        ),
        qkv_proj=SimpleNamespace(weight=nn.Parameter(torch.randn(rows, WIDTH), False)),
        # A parameter that learns, as SGLang's norms are.
        k_norm=SimpleNamespace(weight=nn.Parameter(torch.randn(DIM)), variance_epsilon=1e-6),
    )
    return SimpleNamespace(self_attn=attention)


def helper(layers) -> FusedKVMaterializeHelper:
    own = layers[0].self_attn
    return FusedKVMaterializeHelper(layers, own.rotary_emb, KV_HEADS, DIM, torch.device("cpu"))


def served() -> SimpleNamespace:
    """A worker that has learnt something of its drafter."""
    layers = [layer() for _ in range(LAYERS)]
    control = WidthController(WidthSetting("adaptive", (1, 7)), 7)
    control.policy.learn(7, [6, 0], [3])
    temperature = DraftTemperature("cpu")
    temperature.accepted[:, 0] = 9.0
    temperature.current.fill_(0.0)
    return SimpleNamespace(
        device="cpu",
        model_runner=SimpleNamespace(forward_stream=torch.cpu.Stream()),
        draft_model=SimpleNamespace(layers=layers),
        drafter=SimpleNamespace(draft_temperature=temperature),
        width_control=control,
        _fused_kv_helper=helper(layers),
    )


def renew(layers) -> None:
    for each in layers:
        own = each.self_attn
        own.qkv_proj.weight.data.copy_(torch.randn_like(own.qkv_proj.weight))
        own.k_norm.weight.data.copy_(torch.randn(DIM))


def derived(one: FusedKVMaterializeHelper) -> list[torch.Tensor]:
    return [one.flat_kv_weight_t, one.k_norm_weights]


@pytest.mark.parametrize("rebuilds", [True, False])
def test_derived_values_are_those_of_a_new_worker_at_their_old_addresses(monkeypatch, rebuilds):
    if not rebuilds:
        monkeypatch.setattr(replace, "rebuild", lambda worker: None)
    worker = served()
    before = [each.data_ptr() for each in derived(worker._fused_kv_helper)]
    with replacing(worker):
        renew(worker.draft_model.layers)
    found = derived(worker._fused_kv_helper)
    expected = derived(helper(worker.draft_model.layers))
    assert [each.data_ptr() for each in found] == before
    equal = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
    assert equal == [rebuilds, rebuilds]


def test_every_tensor_of_sglang_s_helper_that_comes_from_weights_is_rebuilt():
    """Two helpers of layers with other weights differ in these tensors and in no others."""
    layers = [layer() for _ in range(LAYERS)]
    first = helper(layers)
    renew(layers)
    second = helper(layers)
    differs = {
        name
        for name, value in vars(first).items()
        if isinstance(value, torch.Tensor) and not torch.equal(value, getattr(second, name))
    }
    assert differs == {"flat_kv_weight_t", "k_norm_weights"}


def test_what_was_learnt_of_the_old_drafter_is_forgotten():
    worker, fresh = served(), WidthController(WidthSetting("adaptive", (1, 7)), 7)
    address = worker.drafter.draft_temperature.current.data_ptr()
    with replacing(worker):
        pass
    for own, new in zip(worker.width_control.policy.classes, fresh.policy.classes, strict=True):
        assert vars(own) == vars(new)
    temperature, new = worker.drafter.draft_temperature, DraftTemperature("cpu")
    assert torch.equal(temperature.current, new.current)
    assert torch.equal(temperature.accepted, new.accepted)
    assert temperature.current.data_ptr() == address


def test_copies_come_after_the_round_that_runs_and_before_the_next(monkeypatch):
    """With overlap scheduling that round is on a stream of its own."""
    order = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other) -> None:
            order.append(f"{self.name} waits for {other.name}")

    rounds, schedule = Stream("rounds"), Stream("schedule")
    module = SimpleNamespace(current_stream=lambda: schedule, stream=lambda _: nullcontext())
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    worker = served()
    worker.model_runner.forward_stream = rounds
    monkeypatch.setattr(replace, "rebuild", lambda worker: order.append("derived"))
    with replacing(worker):
        order.append("weights")
    assert order == [
        "rounds waits for schedule",
        "weights",
        "derived",
        "schedule waits for rounds",
    ]


def test_a_worker_without_sglang_s_fused_write_has_nothing_to_rebuild():
    worker = served()
    worker._fused_kv_helper = None
    rebuild(worker)


def test_host_copies_are_independent():
    source = torch.ones(3)
    found = in_own_memory([("a", source)], pinned=False)
    source.zero_()
    assert found["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("trial", "width"), [(False, 1), (True, 2)])
def test_every_round_of_a_trial_drafts(trial, width):
    """Else the policy would hardly look at a poor drafter, and its trial would take minutes."""
    control = WidthController(WidthSetting("adaptive", (1, 2, 4, 7)), 7)
    control.policy.width, control.trial = 1, trial
    assert control.next(1, 0) == width


def test_the_draft_model_s_weights_keep_their_addresses():
    """Captured graphs read them there. Nothing is replaced unless every tensor fits."""
    found = draft_weights.examined()
    assert found["doubled"] and found["in place"] and found["unchanged"] and not found["kept"]
    assert 0 < found["partly"] <= 7
    assert found["contexts"] == ["before", "after"] * 2
    unexpected, shape = found["refusals"]
    assert "unexpected tensor other" in unexpected and "norm.weight has shape (2,)" in shape


def test_a_server_that_follows_a_folder_takes_no_tensors_and_keeps_its_first(tmp_path):
    found = draft_weights.examined(HYPERDFLASH_FOLLOW=str(tmp_path))
    assert found["kept"] and found["own"]
    assert found["partly"] == 0 and found["contexts"] == ["before", "after"]
    assert all("HYPERDFLASH_FOLLOW is set" in refusal for refusal in found["refusals"])
