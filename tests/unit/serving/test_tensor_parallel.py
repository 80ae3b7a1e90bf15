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
from sglang_hyperdflash.serving.startup.pair import check_ranks_agree
from sglang_hyperdflash.tools.environment import VARIABLES
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


def handed_over(**layout):
    """What SGLang hands to a check of arguments: it rewrites both spellings of attention DP."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.parallel_hook import handle_deprecated_dp_attention
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="target", **layout)
    handle_deprecated_dp_attention(arguments)
    return resolving_view(arguments)


@pytest.mark.parametrize(
    "layout",
    [
        *({"tp_size": ranks} for ranks in (1, 2, 4, 8)),
        {"tp_size": 16, "attn_dp_size": 2},
        {"tp_size": 48, "attn_dp_size": 48},
        {"tp_size": 48, "dp_size": 48, "enable_dp_attention": True},
    ],
)
def test_ranks_that_split_or_replicate_the_draft_s_heads_are_accepted(layout):
    check_ranks(handed_over(**layout), DRAFT)


@pytest.mark.parametrize(
    "layout, change",
    [
        ({"tp_size": 3}, {}),
        ({"tp_size": 16}, {}),
        ({"tp_size": 8}, {"intermediate_size": 100}),
        ({"tp_size": 4}, {"num_attention_heads": 24, "num_key_value_heads": 3}),
        ({"tp_size": 48, "attn_dp_size": 3}, {}),
        # Drafters are split over context-parallel ranks too.
        ({"tp_size": 16, "attn_cp_size": 2}, {}),
    ],
)
def test_ranks_that_cannot_share_the_draft_are_refused(layout, change):
    ranks = layout["tp_size"] // layout.get("attn_dp_size", 1)
    with pytest.raises(HyperDFlashConfigError, match=f"split over {ranks} ranks"):
        check_ranks(handed_over(**layout), {**DRAFT, **change})


OTHER_SETTINGS = {
    "HYPERDFLASH_WIDTH": "full",
    "HYPERDFLASH_WIDTHS": "1,7",
    "HYPERDFLASH_DRAFT_TEMPERATURE": "0.5",
    "HYPERDFLASH_DRAFT_POOL_RATIO": "0.2",
    "HYPERDFLASH_FOLLOW": "set",  # its path may differ
}


@pytest.mark.parametrize("name, value", OTHER_SETTINGS.items())
def test_nodes_of_different_settings_are_refused_on_every_rank(monkeypatch, name, value):
    told = []
    check_ranks_agree(lambda unset: told.append(unset) or [unset, unset])
    monkeypatch.setenv(name, value)
    check_ranks_agree(lambda here: [here, here])
    with pytest.raises(HyperDFlashConfigError, match=f"{name} .* rank 0: unset; rank 1: {value}"):
        check_ranks_agree(lambda here: [*told, here])
    with pytest.raises(HyperDFlashConfigError, match=f"{name} .* rank 0: {value}; rank 1: unset"):
        check_ranks_agree(lambda here: [here, *told])


def test_every_setting_of_a_server_is_compared_unless_it_is_a_rank_s_own():
    no_server = ("_API_KEY", "_CPU_KV_GIB", "_CAPTURE_FOLDER", "_SOAK", "_TEST")
    ranks_own = tuple(f"HYPERDFLASH{part}" for part in ("_RECORD", *no_server))
    names = {variable.name for variable in VARIABLES}
    assert {name for name in names if not name.startswith(ranks_own)} == set(OTHER_SETTINGS)


@pytest.mark.parametrize("algorithm, refused", [("HYPERDFLASH", True), ("dflash", False)])
@pytest.mark.parametrize(
    "prefill, decode", [((8, 1), (1, 1)), ((1, 1), (8, 1)), ((1, 8), (1, 1)), ((8, 1), (8, 1))]
)
def test_a_prefill_node_of_another_attention_tp_is_refused_at_hand_shake(
    algorithm, refused, prefill, decode
):
    """SGLang's own mapping of ranks, which every transfer backend uses."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo

    node = CommonKVManager.__new__(CommonKVManager)
    vars(node).update(
        server_args=SimpleNamespace(speculative_algorithm=algorithm),
        kv_args=SimpleNamespace(engine_rank=0),
        is_mla_backend=True,
        is_hybrid_mla_backend=False,
        attn_tp_size=decode[0],
        attn_cp_size=decode[1],
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
        enable_all_cp_ranks_for_transfer=False,
    )
    tp, cp = prefill
    info = PrefillServerInfo(tp, cp, 1, 1, 256, "bfloat16", follow_bootstrap_room=True)
    if refused and prefill != decode:
        numbers = f"prefill has {tp} and {cp}, decode {decode[0]} and {decode[1]}"
        with pytest.raises(HyperDFlashConfigError, match=numbers):
            node._resolve_rank_mapping(info)
    else:
        node._resolve_rank_mapping(info)
        assert info.target_tp_ranks is not None
