"""The hooks on SGLang's DFLASH path touch drafts of ours and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving import dflash_seams


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
    monkeypatch.setattr(dflash_seams, "_own_dtype", {"HYPERDFLASH"})


def test_drafts_of_ours_keep_their_dtype():
    assert cast("HYPERDFLASH", draft=True) == torch.float32


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE", "DFLASH", "HYPERDFLASH"])
def test_a_target_that_is_sent_embeddings_keeps_sglangs_cast(algorithm):
    assert cast(algorithm, draft=False) == torch.bfloat16


def test_drafts_of_others_keep_sglangs_cast_unless_asked_for():
    assert cast("DFLASH", draft=True) == torch.bfloat16
    dflash_seams.keep_dtype_of("DFLASH")
    assert cast("DFLASH", draft=True) == torch.float32


def test_replaced_embeddings_keep_sglangs_cast():
    assert cast("HYPERDFLASH", draft=True, replaced=True) == torch.bfloat16
