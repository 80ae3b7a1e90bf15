"""HYPERDFLASH on SGLang's own DeepSeek-V4: resolution and pool sizing, as SGLang runs them.

Bytes are compared with a calculation from the published dimensions alone.
"""

import math
from dataclasses import replace
from itertools import product

import pytest

from sglang_hyperdflash.training.drafter import DrafterShape
from tests.unit.serving import v4_shapes
from tests.unit.serving.v4_shapes import DSPARK, FLASH, PRO, V41, draft_folder, target_folder
from tests.unit.targets.v4_start import start

pytestmark = pytest.mark.heavy

DRAFT = DrafterShape(layers=5, heads=32, kv_heads=8, head_dim=128, intermediate_size=8192)
WINDOW = 512
SHAPES = {"flash": FLASH, "pro": PRO}
WINDOWED = replace(DRAFT, window=WINDOW)
# Drafters by name: the target's shape, and theirs.
DRAFTS = {
    "flash": (FLASH, DRAFT),
    "flash window": (FLASH, WINDOWED),
    "pro": (PRO, DRAFT),
    "pro window": (PRO, WINDOWED),
    "v41": (V41, replace(DRAFT, reducer="fc")),
}
ONE = {"gpu_gib": 141.0, "weights_gib": 40.0}
EIGHT = {"gpu_gib": 141.0, "weights_gib": 20.0, "tp": 8}
# Pools of both targets: what differs from HYPERDFLASH on one GPU.
SIZED = {
    "none": {"method": "baseline", "draft": None},
    "none tp8": {"method": "baseline", "draft": None, "node": EIGHT},
    "EAGLE": {"method": "EAGLE", "draft": None},
    "tp1": {},
    "tp8": {"node": EIGHT},
    "dp8": {"node": EIGHT | {"dp_attention": True}},
    "window": {"window": True},
}


def option(**values) -> dict:
    return {"options": values}


ALGORITHM, BACKEND = "speculative_algorithm", "speculative_draft_attention_backend"
DRAFT_KV = "speculative_draft_kv_cache_dtype"
PREFILL = option(disaggregation_mode="prefill")
FLASHINFER = option(**{BACKEND: "flashinfer"})
HOPPER, BLACKWELL = ({"platform": {name: True}} for name in ("is_sm90", "is_sm100"))
WINDOW_DRAFT, V41_PAIR = {"draft": "pro window"}, {"target": "v41", "draft": "v41"}
DEFAULTS = {
    ALGORITHM: "HYPERDFLASH",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 1,
    "speculative_num_draft_tokens": 7,
    BACKEND: "triton",
    DRAFT_KV: "bfloat16",
    "speculative_draft_window_size": None,
    "speculative_draft_load_format": "safetensors",
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "dsv4",
    "page_size": 256,
    "disable_overlap_schedule": False,
}
# What differs from a start on V4-Pro; fields that it resolves to, or what the error names.
STARTS = {
    "defaults": ({"node": EIGHT}, DEFAULTS),
    "flash": ({"target": "flash", "draft": "flash", "node": EIGHT}, DEFAULTS),
    "window": (WINDOW_DRAFT, {"speculative_draft_window_size": WINDOW}),
    "lower case": ({"algorithm": "hyperdflash"}, {ALGORITHM: "HYPERDFLASH"}),
    "prefill": (PREFILL, {"speculative_draft_window_size": 2048}),
    "v41": (V41_PAIR, {ALGORITHM: "HYPERDFLASH", BACKEND: "triton"}),
    "fp8 draft": (option(**{DRAFT_KV: "fp8_e4m3"}), {DRAFT_KV: "fp8_e4m3"}),
    "requests": ({"node": ONE | {"max_running_requests": None}}, {"max_running_requests": 256}),
    # SGLang's own fallback, FlashInfer, waits for the host every round; the user may name it.
    "hopper": (HOPPER, {BACKEND: "fa3"}),
    "blackwell": (BLACKWELL, {BACKEND: "fa4"}),
    "hopper, window": (HOPPER | WINDOW_DRAFT, {BACKEND: "triton"}),
    "named": (HOPPER | FLASHINFER, {BACKEND: "flashinfer"}),
    "named, window": (HOPPER | WINDOW_DRAFT | FLASHINFER, {BACKEND: "flashinfer"}),
    "another target's": ({"draft": "flash"}, "made for a target"),
    "DFLASH": ({"algorithm": "DFLASH"}, "Only EAGLE and DSPARK"),
    "v41 EAGLE": ({"target": "v41", "draft": None, "method": "EAGLE"}, "DSpark"),
    "v41 prefill": (V41_PAIR | PREFILL, {"speculative_draft_window_size": 2048}),
    "window, fa3": (WINDOW_DRAFT | option(**{BACKEND: "fa3"}), "draft attention"),
    "attention dp": ({"node": EIGHT} | option(attn_dp_size=8), "enable-dp-lm-head"),
    "unified": (option(enable_unified_memory=True), "SGLang's own algorithms"),
    "lmcache": (option(enable_lmcache=True), "does not yet support speculative decoding"),
    "block": (option(speculative_use_block_verification=True), "only supports EAGLE"),
}


# Published recipes of DeepSeek-V4-Pro: how ranks share it, and what a server of it is besides.
DP, HOST = {"attn_dp_size": 8, "enable_dp_lm_head": True}, {"enable_hierarchical_cache": True}
SHARED = {"tp": {}, "attention dp": DP}
SHARED |= {name: DP | {"moe_a2a_backend": name} for name in ("deepep", "megamoe", "mori")}
SERVED = {
    "alone": {},
    "tokenizers": {"tokenizer_worker_num": 8},
    "host cache": HOST,
    "file storage": HOST | {"hicache_storage_backend": "file"},
    "mooncake storage": HOST | {"hicache_storage_backend": "mooncake"},
    "prefill node": {"disaggregation_mode": "prefill"},
    "prefill node, host cache": HOST | {"disaggregation_mode": "prefill"},
    "decode node": {"disaggregation_mode": "decode"},
}
# The drafter, and the window that it has on a server that computes its prompts itself.
SWAPPED = {"EAGLE": (None, None), "pro": ("pro", None), "pro window": ("pro window", WINDOW)}


def recipes() -> dict[str, dict]:
    """Each with SGLang's own algorithm, then with only the algorithm changed."""
    cases = {}
    for shared, served, swapped in product(SHARED, SERVED, SWAPPED):
        case = option(**SHARED[shared], **SERVED[served])
        case |= {"node": EIGHT, "platform": {"is_sm100": True, "is_cuda": True}}
        case |= {"draft": SWAPPED[swapped][0]}
        cases[f"{shared}, {served}, {swapped}"] = case | (
            {} if SWAPPED[swapped][0] else {"method": "EAGLE"}
        )
    return cases


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    root, cases = tmp_path_factory.mktemp("v4"), {}
    for name in SHAPES:
        for kind, changes in SIZED.items():
            draft = f"{name} window" if "window" in changes else name
            cases[f"{name} {kind}"] = {"target": name, "draft": draft} | changes
    pro = {"target": "pro", "draft": "pro", "size": False}
    cases |= {name: pro | changes for name, (changes, _) in STARTS.items()}
    cases |= {name: pro | case for name, case in recipes().items()}
    targets = {
        name: str(target_folder(root / "targets" / name, shape))
        for name, shape in {**SHAPES, "v41": V41}.items()
    }
    drafts = {name: str(draft_folder(root / name, *made)) for name, made in DRAFTS.items()}
    for case in cases.values():
        case["target"], case["draft"] = targets[case["target"]], drafts.get(case["draft"])
    common = {"method": "HYPERDFLASH", "node": ONE}
    return start({name: common | case for name, case in cases.items()})


def test_the_shipped_sample_is_the_published_dimensions():
    """Flash's, which transformers' configuration has by default, and what it does not have."""
    from transformers import DeepseekV4Config

    known = DeepseekV4Config().to_dict()
    differ = {name: value for name, value in FLASH.items() if known.get(name) != value}
    assert len(FLASH) == 37 and differ == {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "num_hash_layers": 3,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }
    assert v4_shapes.sample("dspark") == FLASH | DSPARK


def page(slot: int, slots: int) -> float:
    """Bytes of a latent slot in pages padded to 576 bytes, as FlashMLA's layout has them."""
    return math.ceil(slot * slots / 576) * 576 / slots


def target_bytes(shape: dict, speculative: bool) -> float:
    """Bytes of a full token of the target: published dimensions, fp8 latents, page 256."""
    rope = shape["qk_rope_head_dim"]
    nope = shape["head_dim"] - rope
    latent = nope + 2 * rope + 8  # fp8, bf16 rope part, scales
    index = shape["index_head_dim"]
    layers = shape["num_hidden_layers"]
    c4, c128 = (shape["compress_ratios"][:layers].count(ratio) for ratio in (4, 128))
    compressed = c4 * (page(latent, 64) + index + 4) / 4 + c128 * page(latent, 2) / 128
    ring = 16 if speculative else 8
    states = 4 * 4 * (shape["head_dim"] + index)  # fp32 (kv, score) with overlap
    window = layers * page(latent, 256) + c4 * ring / 256 * states
    return compressed + 0.1 * window


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_equal_an_independent_calculation(answers, name):
    shape, draft = SHAPES[name], 2 * DRAFT.layers * DRAFT.kv_heads * DRAFT.head_dim * 2
    layers, speculative = shape["num_hidden_layers"], target_bytes(shape, True)
    expected = {
        "none": target_bytes(shape, False),
        "EAGLE": speculative * (layers + 1) / layers,
        "tp1": speculative + draft,
        "tp8": speculative + draft / 8,
        "dp8": speculative + draft,
        "window": speculative + math.ceil(0.1 * (draft + 8)) + 8,
    }
    for case, wanted in expected.items():
        budget = answers[f"{name} {case}"]["budget"]
        assert budget["bytes_per_token"] == pytest.approx(wanted, rel=1e-9), case
    # The goal of a window: two KiB a token; nine bytes more are its tables.
    assert budget["draft_bytes_per_token"] <= 2048 + 9


@pytest.mark.parametrize("name", SHAPES)
def test_the_draft_is_paid_for_out_of_the_tokens(answers, name):
    """Tokens x bytes and the fixed state fill the memory, no more and not a page less."""
    layers = SHAPES[name]["num_hidden_layers"]
    c128 = SHAPES[name]["compress_ratios"][:layers].count(128)
    for case in ("none", "none tp8", "tp1", "tp8", "window"):
        answer = answers[f"{name} {case}"]
        ring = 128 if case.startswith("none") else 256
        rows = math.ceil(((256 + 1) * ring + ring + 1) / 128) * 128
        fixed = rows * 2 * SHAPES[name]["head_dim"] * 4 * c128
        budget = answer["budget"]
        left = answer["kv_bytes"] - fixed - budget["tokens"] * budget["bytes_per_token"]
        assert 0 <= left < 256 * budget["bytes_per_token"], case


@pytest.mark.parametrize("case", STARTS)
def test_what_a_start_resolves_to_or_why_it_is_refused(answers, case):
    answer, expected = answers[case], STARTS[case][1]
    if isinstance(expected, dict):
        assert expected.items() <= answer.items(), answer
    else:
        assert expected.lower() in answer.get("error", "it started").lower()


def test_recipes_start_with_only_the_algorithm_changed(answers):
    errors = {name: answers[name]["error"] for name in recipes() if "error" in answers[name]}
    assert errors == {} and len(recipes()) == 120
    for shared, served, draft in product(SHARED, SERVED, ("pro", "pro window")):
        window = answers[f"{shared}, {served}, {draft}"]["speculative_draft_window_size"]
        elsewhere = any(word in served for word in ("node", "storage"))
        assert window == SWAPPED[draft][1] or (elsewhere and window == 2048), (shared, served)


# Target and SGLang's own algorithm. Its pool sizes are compared too, but for V4.1: it has none.
OTHERS = {"flash EAGLE": FLASH, "flash DSPARK": FLASH, "v41 DSPARK": V41}


@pytest.mark.slow
def test_sglangs_own_algorithms_start_exactly_as_without_our_plugin(tmp_path):
    cases = {}
    for name, shape in OTHERS.items():
        folder, method = name.split()
        target = str(target_folder(tmp_path / folder, shape | DSPARK))
        case = {"target": target, "draft": None, "method": method, "node": ONE, "whole": True}
        cases[name] = case | {"size": shape is FLASH}
    control = {"ours": case | {"method": "HYPERDFLASH", "size": False}}
    ours, plain = start(cases), start(cases | control, SGLANG_PLUGINS="no-such-plugin")
    assert "error" in plain["ours"], "the second process had the plugin"
    for name in OTHERS:
        assert "error" not in ours[name], ours[name]
        resolved, expected = ours[name].pop("whole"), plain[name].pop("whole")
        differ = {field for field in expected if resolved[field] != expected[field]}
        assert len(expected) > 300 and differ <= {"random_seed"}, name
        assert ours[name] == plain[name], name
