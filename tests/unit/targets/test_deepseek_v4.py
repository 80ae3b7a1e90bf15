"""HYPERDFLASH on SGLang's own DeepSeek-V4: resolution and pool sizing, as SGLang runs them.

Bytes are compared with a calculation from the published dimensions alone.
"""

from __future__ import annotations

import math

import pytest

from sglang_hyperdflash.training.drafter import DrafterShape
from tests.unit.serving.v4_shapes import SHAPES, V41, draft_folder, target_folder
from tests.unit.targets.v4_start import start

DRAFT = DrafterShape(layers=5, heads=32, kv_heads=8, head_dim=128, intermediate_size=8192)
ONE = {"gpu_gib": 141.0, "weights_gib": 40.0}
EIGHT = {"gpu_gib": 141.0, "weights_gib": 20.0, "tp": 8}
WINDOW = 512


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    root = tmp_path_factory.mktemp("v4")
    cases = {}
    for name, shape in SHAPES.items():
        target = str(target_folder(root / name / "target", shape))
        draft = str(draft_folder(root / name / "draft", shape, DRAFT))
        windowed = DrafterShape(**{**vars(DRAFT), "window": WINDOW})
        window = str(draft_folder(root / name / "window", shape, windowed))
        base = {"target": target, "draft": draft, "method": "HYPERDFLASH"}
        plain = {"target": target, "draft": None}
        cases |= {
            f"{name} none tp1": plain | {"method": "baseline", "node": ONE},
            f"{name} none tp8": plain | {"method": "baseline", "node": EIGHT},
            f"{name} EAGLE tp1": plain | {"method": "EAGLE", "node": ONE},
            f"{name} tp1": base | {"node": ONE},
            f"{name} tp8": base | {"node": EIGHT},
            f"{name} dp8": base | {"node": EIGHT | {"dp_attention": True}},
            f"{name} window": base | {"draft": window, "node": ONE},
        }
        other = "pro" if name == "flash" else "flash"
        cases[f"{name} wrong draft"] = base | {
            "draft": str(draft_folder(root / name / "other", SHAPES[other], DRAFT)),
            "node": ONE,
        }
    start_only = base | {"node": ONE, "size": False}
    cases["lower case"] = start_only | {"algorithm": "hyperdflash"}
    cases["DFLASH"] = start_only | {"algorithm": "DFLASH"}
    cases["fp8 draft"] = start_only | {"options": {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}}
    cases["no requests given"] = start_only | {"node": ONE | {"max_running_requests": None}}
    cases["prefill node"] = start_only | {"options": {"disaggregation_mode": "prefill"}}
    cases["window, prefill"] = cases["prefill node"] | {"draft": window}
    hopper, blackwell = ({"platform": {name: True}} for name in ("is_sm90", "is_sm100"))
    cases["hopper"], cases["blackwell"] = start_only | hopper, start_only | blackwell
    cases["window, hopper"] = cases["hopper"] | {"draft": window}
    named = {"options": {"speculative_draft_attention_backend": "flashinfer"}}
    cases["flashinfer"] = cases["hopper"] | named
    cases["window, flashinfer"] = cases["window, hopper"] | named
    cases["window, fa3"] = start_only | {
        "draft": window,
        "options": {"speculative_draft_attention_backend": "fa3"},
    }
    for option, value in {
        "pp_size": 2,
        "enable_lora": True,
        "enable_hisparse": True,
        "enable_unified_memory": True,
        "enable_hierarchical_cache": True,
        "enable_lmcache": True,
        "speculative_use_block_verification": True,
        "tokenizer_worker_num": 2,
    }.items():
        cases[option] = start_only | {"options": {option: value}}
    cases["attn_dp_size"] = start_only | {"options": {"attn_dp_size": 8}, "node": EIGHT}
    cases |= v41_cases(root)
    return start(cases)


def v41_cases(root) -> dict[str, dict]:
    draft = DrafterShape(**{**vars(DRAFT), "reducer": "fc"})
    case = {
        "target": str(target_folder(root / "v41" / "target", V41)),
        "draft": str(draft_folder(root / "v41" / "draft", V41, draft)),
        "method": "HYPERDFLASH",
        "node": ONE,
        "size": False,
    }
    prefill = {"disaggregation_mode": "prefill"}
    eagle = {"method": "EAGLE", "draft": None}
    return {
        "v41": case,
        "v41 EAGLE": case | eagle,
        "v41 prefill": case | {"options": prefill},
    }


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
    c4 = shape["compress_ratios"][:layers].count(4)
    c128 = shape["compress_ratios"][:layers].count(128)
    compressed = c4 * (page(latent, 64) + index + 4) / 4 + c128 * page(latent, 2) / 128
    ring = 16 if speculative else 8
    states = 4 * 4 * (shape["head_dim"] + index)  # fp32 (kv, score) with overlap
    window = layers * page(latent, 256) + c4 * ring / 256 * states
    return compressed + 0.1 * window


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_equal_an_independent_calculation(answers, name):
    shape = SHAPES[name]
    draft = 2 * DRAFT.layers * DRAFT.kv_heads * DRAFT.head_dim * 2
    assert draft == 20 * 1024
    layers = shape["num_hidden_layers"]
    expected = {
        "none tp1": target_bytes(shape, False),
        "EAGLE tp1": target_bytes(shape, True) * (layers + 1) / layers,
        "tp1": target_bytes(shape, True) + draft,
        "tp8": target_bytes(shape, True) + draft / 8,
        "dp8": target_bytes(shape, True) + draft,
        "window": target_bytes(shape, True) + math.ceil(0.1 * (draft + 8)) + 8,
    }
    for case, wanted in expected.items():
        assert answers[f"{name} {case}"]["budget"]["bytes_per_token"] == pytest.approx(
            wanted, rel=1e-9
        ), case


@pytest.mark.parametrize("name", SHAPES)
def test_the_draft_is_paid_for_out_of_the_tokens(answers, name):
    """Tokens x bytes and the fixed state fill the memory, no more and not a page less."""
    layers = SHAPES[name]["num_hidden_layers"]
    c128 = SHAPES[name]["compress_ratios"][:layers].count(128)
    for case in ("none tp1", "tp1", "tp8", "window"):
        answer = answers[f"{name} {case}"]
        ring = 128 if case == "none tp1" or case == "none tp8" else 256
        rows = math.ceil(((256 + 1) * ring + ring + 1) / 128) * 128
        fixed = rows * 2 * SHAPES[name]["head_dim"] * 4 * c128
        budget = answer["budget"]
        left = answer["kv_bytes"] - fixed - budget["tokens"] * budget["bytes_per_token"]
        assert 0 <= left < 256 * budget["bytes_per_token"], case


@pytest.mark.parametrize("name", SHAPES)
def test_resolved_fields(answers, name):
    found = answers[f"{name} tp8"]
    expected = {
        "speculative_algorithm": "HYPERDFLASH",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 1,
        "speculative_num_draft_tokens": 7,
        "speculative_draft_attention_backend": "triton",
        "speculative_draft_kv_cache_dtype": "bfloat16",
        "speculative_draft_window_size": None,
        "speculative_draft_load_format": "safetensors",
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "dsv4",
        "page_size": 256,
        "disable_overlap_schedule": False,
    }
    assert {key: found[key] for key in expected} == expected
    assert answers[f"{name} window"]["speculative_draft_window_size"] == WINDOW


def test_spelling_and_what_the_user_asked_for(answers):
    assert answers["lower case"]["speculative_algorithm"] == "HYPERDFLASH"
    assert answers["fp8 draft"]["speculative_draft_kv_cache_dtype"] == "fp8_e4m3"
    assert answers["no requests given"]["max_running_requests"] == 256
    assert answers["prefill node"]["speculative_algorithm"] == "HYPERDFLASH"
    assert answers["v41"]["speculative_algorithm"] == "HYPERDFLASH"
    assert answers["v41"]["speculative_draft_attention_backend"] == "triton"


@pytest.mark.parametrize(
    "case, backend",
    [
        ("hopper", "fa3"),
        ("blackwell", "fa4"),
        ("window, hopper", "triton"),
        ("flashinfer", "flashinfer"),
        ("window, flashinfer", "flashinfer"),
    ],
)
def test_draft_attention_by_the_gpu_and_by_the_user(answers, case, backend):
    """SGLang's own fallback, FlashInfer, waits for the host every round; the user may name it."""
    assert answers[case]["speculative_draft_attention_backend"] == backend


@pytest.mark.parametrize("name", SHAPES)
def test_a_window_makes_the_drafter_cost_two_kib_a_token(answers, name):
    """The goal on V4-Flash at tp 1, and what it gives back in tokens."""
    # Nine bytes of them are the window's tables.
    assert answers[f"{name} window"]["budget"]["draft_bytes_per_token"] <= 2048 + 9
    tokens = {c: answers[f"{name} {c}"]["budget"]["tokens"] for c in ("none tp1", "tp1", "window")}
    assert tokens["window"] > 2 * tokens["tp1"]
    assert tokens["window"] > 0.65 * tokens["none tp1"]


def test_other_algorithms_are_untouched(answers):
    """DFLASH is still refused on V4 by SGLang itself; EAGLE keeps SGLang's own fields."""
    assert "Only EAGLE and DSPARK" in answers["DFLASH"]["error"]
    for name in SHAPES:
        eagle = answers[f"{name} EAGLE tp1"]
        assert eagle["speculative_algorithm"] == "EAGLE"
        assert eagle["speculative_draft_kv_cache_dtype"] is None
        none = answers[f"{name} none tp1"]
        assert none["speculative_algorithm"] is None and none["speculative_eagle_topk"] is None


@pytest.mark.parametrize(
    "case, message",
    [
        ("flash wrong draft", "made for a target"),
        ("v41 EAGLE", "does not support speculative decoding other than DSpark"),
        ("v41 prefill", "does not support disaggregation_mode on DeepSeek-V4.1"),
        ("window, prefill", "with a windowed drafter"),
        ("window, fa3", "needs draft attention that reads single K/V slots"),
        ("pp_size", "HYPERDFLASH does not support pp_size=2"),
        # SGLang's rules for DFLASH.
        ("attn_dp_size", " HYPERDFLASH with dp attention requires --enable-dp-lm-head"),
        ("enable_lora", "enable_lora=True"),
        ("enable_hisparse", "hisparse"),
        ("enable_unified_memory", "admits SGLang's own algorithms only"),
        ("enable_lmcache", "does not yet support speculative decoding"),
        ("speculative_use_block_verification", "only supports EAGLE"),
        ("enable_hierarchical_cache", "enable_hierarchical_cache=True"),
        ("tokenizer_worker_num", "tokenizer_worker_num=2"),
    ],
)
def test_what_cannot_work_is_refused(answers, case, message):
    assert message.lower() in answers[case].get("error", "started").lower()
