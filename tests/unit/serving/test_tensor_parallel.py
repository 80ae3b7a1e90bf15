"""Ranks: their parts of the vocabulary and of the drafter, and what they must agree on."""

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.parallel_hook import handle_deprecated_dp_attention
from sglang.srt.server_args import ServerArgs

from docs.reference.variables import VARIABLES
from sglang_hyperdflash.cpu.portable.weights import shard_rows
from sglang_hyperdflash.serving.settings import read_settings
from sglang_hyperdflash.serving.startup.checks import check_ranks
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


@pytest.mark.parametrize(
    "embed, head",
    [("embed.weight", "head.weight"), ("model.embed_tokens.weight", "lm_head.weight")],
)
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
    for shape in ((5, 3), (11, 3), (10,)):
        own = {"lm_head.weight": slice(0, 5)}
        with pytest.raises(HyperDFlashConfigError, match=r"head\.weight"):
            list(shard_rows({"head.weight": torch.zeros(shape)}.items(), own, total=10))


DRAFT = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.mark.parametrize(
    "layout, change, refused",
    [
        ({"tp_size": 8}, {}, False),
        ({"tp_size": 16, "attn_dp_size": 2}, {}, False),
        ({"tp_size": 48, "dp_size": 48, "enable_dp_attention": True}, {}, False),
        ({"tp_size": 16}, {}, True),
        ({"tp_size": 8}, {"intermediate_size": 100}, True),
        ({"tp_size": 4}, {"num_attention_heads": 24, "num_key_value_heads": 3}, True),
        # Drafters are split over context-parallel ranks too.
        ({"tp_size": 16, "attn_cp_size": 2}, {}, True),
    ],
)
def test_ranks_split_or_replicate_the_draft_s_heads_or_are_refused(layout, change, refused):
    arguments = ServerArgs(model_path="target", **layout)
    handle_deprecated_dp_attention(arguments)  # rewrites both spellings, before SGLang checks
    arguments = resolving_view(arguments)
    if not refused:
        return check_ranks(arguments, DRAFT | change)
    with pytest.raises(HyperDFlashConfigError, match="--tp-size"):
        check_ranks(arguments, DRAFT | change)


OTHER_SETTINGS = {
    "HYPERDFLASH_WIDTH": "full",
    "HYPERDFLASH_WIDTHS": "1,7",
    "HYPERDFLASH_DRAFT_TEMPERATURE": "0.7",
    "HYPERDFLASH_COPY": "4096",
    "HYPERDFLASH_DRAFT_POOL_RATIO": "0.2",
    "HYPERDFLASH_OPERATORS": "torch",
}


@pytest.mark.parametrize("name, value", OTHER_SETTINGS.items())
def test_nodes_of_different_settings_are_refused_on_every_rank(monkeypatch, name, value):
    told = []
    read_settings(7, True).check_ranks_agree(lambda unset: told.append(unset) or [unset, unset])
    monkeypatch.setenv(name, value)
    settings = read_settings(7, True)
    settings.check_ranks_agree(lambda here: [here, here])
    for others in (lambda here: [*told, here], lambda here: [here, *told]):
        with pytest.raises(HyperDFlashConfigError, match=name):
            settings.check_ranks_agree(others)


def test_every_setting_of_a_server_is_compared_unless_it_is_a_rank_s_own():
    no_server = ("_API_KEY", "_CPU", "_CAPTURE_FOLDER", "_SOAK", "_TEST")
    ranks_own = tuple(f"HYPERDFLASH{part}" for part in ("_RECORD", *no_server))
    names = {variable.name for variable in VARIABLES}
    assert {name for name in names if not name.startswith(ranks_own)} == set(OTHER_SETTINGS)
