"""The hooks on SGLang's DFLASH path touch drafts of ours and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving.startup import dflash_seams


def cast(algorithm: str, *, draft: bool, replaced: bool = False) -> torch.dtype:
    """The dtype that input embeddings of fp32 leave the hook in, after SGLang's cast to bf16."""
    runner = SimpleNamespace(
        is_draft_worker=draft, spec_algorithm=SimpleNamespace(name=algorithm), dtype=torch.float32
    )
    batch = SimpleNamespace(
        input_embeds=torch.ones(2, 4), replace_embeds=torch.ones(1) if replaced else None
    )
    kwargs = {"input_embeds": batch.input_embeds.bfloat16()}
    return dflash_seams.keep_draft_embedding_dtype(kwargs, runner, batch)["input_embeds"].dtype


@pytest.fixture(autouse=True)
def only_ours(monkeypatch):
    monkeypatch.setattr(dflash_seams, "own_dtype", {"HYPERDFLASH"})


def test_drafts_of_ours_keep_their_dtype():
    assert cast("HYPERDFLASH", draft=True) == torch.float32


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE", "DFLASH", "HYPERDFLASH"])
def test_a_target_that_is_sent_embeddings_keeps_sglangs_cast(algorithm):
    assert cast(algorithm, draft=False) == torch.bfloat16


def test_drafts_of_others_keep_sglangs_cast_unless_asked_for():
    assert cast("DFLASH", draft=True) == torch.bfloat16
    dflash_seams.own_dtype.add("DFLASH")
    assert cast("DFLASH", draft=True) == torch.float32


def test_replaced_embeddings_keep_sglangs_cast():
    assert cast("HYPERDFLASH", draft=True, replaced=True) == torch.bfloat16


@pytest.mark.parametrize("algorithm, columns", [("HYPERDFLASH", 32), ("DFLASH", 20), (None, 20)])
def test_slots_reserved_at_the_end_of_a_context_stay_in_their_request_s_row(
    monkeypatch, algorithm, columns
):
    """Of blocks of 16 rows: two are reserved after the last token that a round may follow."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import allocation_sizing

    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 2 * 16)
    assert dflash_seams.room_for_two_blocks(4 + 16) == columns
