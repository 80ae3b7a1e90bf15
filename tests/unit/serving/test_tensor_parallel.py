"""One rank's share of the portable target's vocabulary, and the CPU start-up's seams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cpu_engine.platform.parallel_seams import (
    THREADS_BIND,
    gather_over_gloo,
    ranks_share_a_node,
    unpadded_heads,
)
from cpu_engine.portable.weights import shard_rows
from sglang_hyperdflash.serving.startup.checks import check_ranks
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# Either naming scheme of a checkpoint.
NAMES = (("embed.weight", "head.weight"), ("model.embed_tokens.weight", "lm_head.weight"))


@pytest.mark.parametrize("embed, head", NAMES)
def test_ranks_rows_make_up_the_vocabulary(embed, head):
    weights = {embed: torch.randn(10, 3), head: torch.randn(10, 3), "norm.weight": torch.ones(3)}
    parts = []
    # As SGLang shards ten rows padded to sixteen: eight, then the last two.
    for own in (slice(0, 8), slice(8, 10)):
        rows = {"embed_tokens.weight": own, "lm_head.weight": own}
        parts.append(dict(shard_rows(weights.items(), rows, total=10)))
    for name in (embed, head):
        assert torch.equal(torch.cat([part[name] for part in parts]), weights[name])
    assert all(part["norm.weight"] is weights["norm.weight"] for part in parts)


@pytest.mark.parametrize("shape", [(5, 3), (11, 3), (10,)])
def test_a_vocabulary_of_another_size_is_refused(shape):
    weights = {"head.weight": torch.zeros(shape)}
    with pytest.raises(HyperDFlashConfigError, match=r"head\.weight has shape .* 10 rows"):
        list(shard_rows(weights.items(), {"lm_head.weight": slice(0, 5)}, total=10))


def test_an_explicit_thread_binding_is_left_to_sglang(monkeypatch):
    def original(*, device):
        return f"bound on {device}"

    monkeypatch.delenv(THREADS_BIND, raising=False)
    assert ranks_share_a_node(original, device="cpu") is None
    monkeypatch.setenv(THREADS_BIND, "0|1")
    assert ranks_share_a_node(original, device="cpu") == "bound on cpu"


def test_head_counts_stay_the_checkpoint_s():
    config = SimpleNamespace(num_key_value_heads=1)
    assert unpadded_heads(pytest.fail, config, None, 2) is config
    assert config.num_key_value_heads == 1


def test_gather_takes_the_plain_path():
    calls = []
    group = SimpleNamespace(_all_gather_into_tensor=lambda *tensors: calls.append(tensors))
    output, own = torch.zeros(4), torch.ones(2)
    gather_over_gloo(pytest.fail, group, output, own)
    assert calls == [(output, own)]


DRAFT = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_that_split_or_replicate_the_draft_s_heads_are_accepted(ranks):
    check_ranks(SimpleNamespace(tp_size=ranks, enable_dp_attention=False), DRAFT)


@pytest.mark.parametrize(
    "ranks, change",
    [
        (3, {}),
        (16, {}),
        (8, {"intermediate_size": 100}),
        (4, {"num_attention_heads": 24, "num_key_value_heads": 3}),
    ],
)
def test_ranks_that_cannot_share_the_draft_are_refused(ranks, change):
    with pytest.raises(HyperDFlashConfigError, match=f"split over --tp-size {ranks}: expected"):
        check_ranks(SimpleNamespace(tp_size=ranks, enable_dp_attention=False), {**DRAFT, **change})
    check_ranks(SimpleNamespace(tp_size=ranks, enable_dp_attention=True), {**DRAFT, **change})
