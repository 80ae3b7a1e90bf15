"""Speculative decoding in plain torch, without an engine or a cache: what tau must come out as.

Every round drafts from the committed tokens alone and verifies greedily with one pass over them
and the drafts. Slow and obvious on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from sglang_hyperdflash.draft.config import DRAFT_ARCHITECTURE
from sglang_hyperdflash.portable.nextn_core import NextNCore
from sglang_hyperdflash.portable.weights import load_core, nextn_tensors
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.nextn import causal_attend
from sglang_hyperdflash.training.reducer_input import source_of
from sglang_hyperdflash.training.samples import States

# Drafts of a round from all committed tokens; the last one's target state does not exist yet.
Draft = Callable[[list[int]], list[int]]


@torch.no_grad()
def decode(
    target: LocalTarget, draft: Draft, prompt: list[int], max_new_tokens: int, stop: int | None
) -> tuple[list[int], list[int]]:
    """Greedy answer and histogram: entry i counts the rounds that accepted i drafts.

    Args:
        stop: the token that ends an answer, or None to go on to the limit.
    """
    tokens, histogram = list(prompt), []
    tokens.append(int(argmax(target, tokens)[-1]))  # the prefill's own token

    def open_() -> bool:
        made = tokens[len(prompt) :]
        return len(made) < max_new_tokens and (stop is None or stop not in made)

    while open_():
        drafts = draft(tokens)
        histogram += [0] * (len(drafts) + 1 - len(histogram))
        wanted = argmax(target, tokens + drafts)[len(tokens) - 1 :].tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == wanted[accepted]:
            accepted += 1
        # As the engine counts: also the right drafts behind an answer's end.
        histogram[accepted] += 1
        for token in wanted[: accepted + 1]:
            if open_():
                tokens.append(token)
    return tokens[len(prompt) :], histogram


def argmax(target: LocalTarget, tokens: list[int]) -> torch.Tensor:
    """The target's greedy token after every position."""
    return target.lm_head(target.features(torch.tensor([tokens]))[0][0]).argmax(-1)


def block_draft(target: LocalTarget, folder: Path) -> Draft:
    """HyperDFlash and vanilla DFlash: one block, anchored at the last committed token."""
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = [DRAFT_ARCHITECTURE]  # vanilla DFlash has the same layers
    drafter = Drafter(raw).eval()
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    config = drafter.config

    def draft(tokens: list[int]) -> list[int]:
        final, residual, layers = target.features_with_layers(
            torch.tensor([tokens[:-1]]), config.captured_layers
        )
        context = drafter.reduce(source_of(config, target, States(residual, final, layers)))
        block = torch.tensor([[tokens[-1], *[config.mask_token_id] * config.num_drafts]])
        seen = torch.ones(1, config.block_size, len(tokens) - 1 + config.block_size).bool()
        if config.window is not None:
            seen[..., : max(0, len(tokens) - 1 - config.window)] = False
        anchor = torch.tensor([[len(tokens) - 1]])
        hidden = drafter(context, target.embed_tokens(block).unsqueeze(1), anchor, seen)
        return target.lm_head(hidden[0, 0, 1:]).argmax(-1).tolist()

    return draft


def chain_draft(target: LocalTarget, folder: Path, steps: int) -> Draft:
    """MTP: row p reads token p+1 and the residual of p; a draft's own residual feeds the next."""
    core = NextNCore(AutoConfig.from_pretrained(folder)).eval()
    load_core(core, nextn_tensors(load_file(folder / "model.safetensors").items()))

    def draft(tokens: list[int]) -> list[int]:
        residual = target.features(torch.tensor([tokens[:-1]]))[1][0]
        after, drafts = list(tokens[1:]), []
        for _ in range(steps):
            n = len(after)
            ids = torch.tensor(after)
            hidden, own = core(
                target.embed_tokens(ids),
                residual,
                ids,
                torch.arange(n),
                causal_attend(1, n, target.scaling),
            )
            drafts.append(int(target.lm_head(hidden[-1]).argmax()))
            after.append(drafts[-1])
            residual = torch.cat([residual, own[-1:]])
        return drafts

    return draft
