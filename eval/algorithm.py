"""All of HyperDFlash at temperature 0 on one page of plain torch: no engine, no cache.

Start reading here. ``serving/worker.py`` does the same through SGLang, with paged K/V, batches and
graphs; ``training/replay.py`` does it for every anchor of an answer at once. Tests compare both
with this file, token for token and round for round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hyperdflash.draft.propose import propose_greedy
from sglang_hyperdflash.draft.reducer import reducer_source

# A function from all committed tokens to the drafts after them.
Propose = Callable[[list[int]], list[int]]


@torch.no_grad()
def propose_block(target, drafter, tokens: list[int]) -> list[int]:
    """Draft the B-1 tokens after ``tokens`` in one pass of the drafter.

    Args:
        target: :class:`~sglang_hyperdflash.training.local_target.LocalTarget`, or an object
            with its ``features``, ``embed_tokens`` and ``lm_head``.
        drafter: :class:`~sglang_hyperdflash.training.drafter.Drafter`.
        tokens: all committed tokens; the last is the anchor, whose target state does not exist
            yet.
    """
    config = drafter.config
    anchor = len(tokens) - 1
    # The target's states of the context: the pre-collapse residual [1, anchor, m * d]; other
    # methods read the means of the streams after some layers.
    _, residual, layers = target.features(torch.tensor([tokens[:-1]]), config.captured_layers)
    # Eq. 1: m streams, weighted by the inherited gate, become one feature per token.
    context = drafter.reduce(reducer_source(config, residual, layers))
    # The block: the anchor, then B-1 masks, embedded by the target.
    block = torch.tensor([[tokens[-1], *[config.mask_token_id] * config.num_drafts]])
    # A row attends to at most W tokens of context before the anchor, and to its whole block; in a
    # causal block only to the rows up to its own.
    visible = torch.ones(1, config.block_size, anchor + config.block_size, dtype=torch.bool)
    if config.causal:
        visible = visible.tril(anchor)
    if config.window is not None:
        visible[..., : max(0, anchor - config.window)] = False
    hidden = drafter(
        context, target.embed_tokens(block).unsqueeze(1), torch.tensor([[anchor]]), visible
    )
    # Row k drafts the token k places after the anchor, with the target's LM head; a dependency
    # head conditions each draft's candidates on the draft before it.
    rows = hidden[0, :, 1:]
    candidates = drafter.candidates(target.lm_head(rows), rows)
    return propose_greedy(candidates, block[:, 0], drafter.dependency)[0].tolist()


@torch.no_grad()
def decode(
    target, propose: Propose, prompt: list[int], max_new_tokens: int, stop: int | None
) -> tuple[list[int], list[int]]:
    """Decode the target's greedy answer, several tokens a round.

    Args:
        propose: for example :func:`propose_block` of a target and a drafter.
        stop: the token that ends an answer, or None to continue to the limit.

    Returns:
        The answer's tokens, and a histogram whose entry i is the number of rounds that accepted
        i drafts. The accept length is tau = 1 + accepted drafts / rounds.
    """
    tokens, histogram = list(prompt), []
    tokens.append(int(greedy(target, tokens)[-1]))  # the token of the prefill

    def unfinished() -> bool:
        answer = tokens[len(prompt) :]
        return len(answer) < max_new_tokens and (stop is None or stop not in answer)

    while unfinished():
        drafts = propose(tokens)
        # Verify: one causal pass of the target over the block gives its token after every row.
        verified = greedy(target, tokens + drafts)[len(tokens) - 1 :].tolist()
        # The longest correct prefix is accepted; the target's token after it is the bonus token.
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == verified[accepted]:
            accepted += 1
        # As in the engine, correct drafts after the end of an answer count too.
        histogram += [0] * (accepted + 1 - len(histogram))
        histogram[accepted] += 1
        for token in verified[: accepted + 1]:
            if unfinished():
                tokens.append(token)
    return tokens[len(prompt) :], histogram


def greedy(target, tokens: list[int]) -> torch.Tensor:
    """Return the target's most probable token after every position, ``[len(tokens)]`` int64."""
    return target.lm_head(target.features(torch.tensor([tokens]))[0][0]).argmax(-1)
