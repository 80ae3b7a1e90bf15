"""Drafts of every method for ``eval.algorithm.decode``, the decoder without an engine."""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from eval.algorithm import Propose, propose_block
from eval.rivals.nextn_core import NextNCore, nextn_tensors
from sglang_hyperdflash.cpu.portable.weights import load_core
from sglang_hyperdflash.draft.config import DRAFT_ARCHITECTURE
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget


def block_draft(target: LocalTarget, folder: Path) -> Propose:
    """HyperDFlash and vanilla DFlash: one block, anchored at the last committed token."""
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = [DRAFT_ARCHITECTURE]  # vanilla DFlash has the same layers
    drafter = Drafter(raw).eval()
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return partial(propose_block, target, drafter)


@torch.no_grad()
def chain(target: LocalTarget, core: NextNCore, steps: int, tokens: list[int]) -> list[int]:
    """MTP: row p reads token p+1 and the residual of p; a draft's own residual feeds the next."""
    residual = target.features(torch.tensor([tokens[:-1]]))[1][0]
    after, drafts = list(tokens[1:]), []
    for _ in range(steps):
        n = len(after)
        ids = torch.tensor(after)
        none = torch.zeros(1, dtype=torch.long)
        attend = target.new_cache(1, n).attend(none, n, target.scaling)
        hidden, own = core(target.embed_tokens(ids), residual, ids, torch.arange(n), attend)
        drafts.append(int(target.lm_head(hidden[-1]).argmax()))
        after.append(drafts[-1])
        residual = torch.cat([residual, own[-1:]])
    return drafts


def chain_draft(target: LocalTarget, folder: Path, steps: int) -> Propose:
    """The drafts of an MTP checkpoint."""
    core = NextNCore(AutoConfig.from_pretrained(folder)).eval()
    load_core(core, nextn_tensors(load_file(folder / "model.safetensors").items()))
    return partial(chain, target, core, steps)
