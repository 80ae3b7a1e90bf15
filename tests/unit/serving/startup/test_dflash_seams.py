"""The hooks on SGLang's DFLASH path touch drafts of ours and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.startup import dflash_seams
from sglang_hyperdflash.serving.startup.pair import check_processors
from sglang_hyperdflash.serving.verification.prefill import process_results_first
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


@pytest.mark.parametrize(
    "algorithm, draft, replaced, kept",
    [
        (ALGORITHM, True, False, True),
        (ALGORITHM, True, True, False),
        (ALGORITHM, False, False, False),  # a target that is sent embeddings
        ("DFLASH", True, False, False),
        ("EAGLE", False, False, False),
    ],
)
def test_drafts_keep_their_embeddings_dtype(monkeypatch, algorithm, draft, replaced, kept):
    monkeypatch.setattr(dflash_seams, "own_dtype", {ALGORITHM})
    spec = SimpleNamespace(name=algorithm)
    runner = SimpleNamespace(is_draft_worker=draft, spec_algorithm=spec, dtype=torch.float32)
    others = torch.ones(1) if replaced else None
    batch = SimpleNamespace(input_embeds=torch.ones(2, 4), replace_embeds=others)
    given = {"input_embeds": batch.input_embeds.bfloat16()}  # as SGLang casts them
    found = dflash_seams.keep_draft_embedding_dtype(given, runner, batch)["input_embeds"]
    assert found.dtype == (torch.float32 if kept else torch.bfloat16)


@pytest.mark.parametrize("algorithm, columns", [(ALGORITHM, 32), ("DFLASH", 20)])
def test_slots_at_the_end_of_a_context_stay_in_their_row(monkeypatch, algorithm, columns):
    """Of blocks of 16 rows: two are reserved after the last token that a round may follow."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import allocation_sizing

    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 2 * 16)
    assert dflash_seams.room_for_two_blocks(4 + 16) == columns


def test_a_server_of_whole_blocks_refuses_processors_at_start():
    check_processors(width_1_allowed=True, enabled=True)
    check_processors(width_1_allowed=False, enabled=False)
    with pytest.raises(HyperDFlashConfigError, match="--enable-custom-logit-processor"):
        check_processors(width_1_allowed=False, enabled=True)


@pytest.mark.parametrize(
    ("algorithm", "processors", "pending", "expected"),
    [
        (ALGORITHM, True, [1], True),
        (ALGORITHM, True, [], False),
        (ALGORITHM, False, [1], False),
        ("DFLASH", True, [1], False),
    ],
)
def test_results_come_before_a_processor_s_round(algorithm, processors, pending, expected):
    scheduler = SimpleNamespace(result_queue=pending)
    info = SimpleNamespace(has_custom_logit_processor=processors)
    batch = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm), sampling_info=info)
    assert process_results_first(False, scheduler, batch, None) is expected
    assert process_results_first(True, scheduler, batch, None) is True
    assert process_results_first(False, scheduler, None, batch) is False
