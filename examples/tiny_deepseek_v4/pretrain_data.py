"""Exchanges as packed rows of tokens for the target's training.

Only whole exchanges, and none attends to another one of its row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from exchanges import Exchange, generate, stream
from make_tokenizer import ASSISTANT, USER

SEQUENCE = 128
MISSES = 25  # exchanges that may fit no row before a batch counts as full


@dataclass
class Batch:
    """``rows`` rows of ``SEQUENCE`` tokens.

    Attributes:
        tokens: ``[rows, SEQUENCE + 1]`` int64, padded with the end token.
        documents: ``[rows, SEQUENCE + 1]`` int64, a token's exchange in its row; -1: padding.
        learned: ``[rows, SEQUENCE + 1]`` bool, the assistant's tokens and their end token.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    learned: torch.Tensor

    @cached_property
    def mask(self) -> torch.Tensor:
        """``[rows, 1, SEQUENCE, SEQUENCE]`` fp32, added to scores: causal, own exchange only."""
        documents = self.documents[:, :-1]
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
        return torch.where(same & causal, 0.0, -1e9).unsqueeze(1)


def encode(tokenizer, exchange: Exchange) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template gives them, and which of them are the assistant's."""
    ids, learned = [tokenizer.bos_token_id], [False]
    for message in exchange.messages:
        content = tokenizer.encode(message["content"], add_special_tokens=False)
        says = message["role"] == "assistant"
        role = tokenizer.convert_tokens_to_ids(ASSISTANT if says else USER)
        ids += [role, *content, *[tokenizer.eos_token_id] * says]
        learned += [False, *[says] * (len(content) + says)]
    return ids, learned


def pack(tokenizer, exchanges: Iterable[Exchange], rows: int) -> Batch:
    """Fill ``rows`` rows, first fit, until the exchanges end or no more fit."""
    width = SEQUENCE + 1
    tokens = torch.full((rows, width), tokenizer.eos_token_id)
    documents = torch.full((rows, width), -1)
    learned = torch.zeros(rows, width, dtype=torch.bool)
    used, number, misses = [0] * rows, [0] * rows, 0
    for exchange in exchanges:
        ids, says = encode(tokenizer, exchange)
        row = next((i for i in range(rows) if used[i] + len(ids) <= width), None)
        if row is None:
            misses += 1
            if misses == MISSES:
                break
            continue
        place = slice(used[row], used[row] + len(ids))
        tokens[row, place] = torch.tensor(ids)
        learned[row, place] = torch.tensor(says)
        documents[row, place] = number[row]
        used[row] += len(ids)
        number[row] += 1
    return Batch(tokens, documents, learned)


def training_batch(tokenizer, seed: int, part: int, rows: int) -> Batch:
    """A function of seed and part alone, so that a run resumes without a state of its data."""
    return pack(tokenizer, stream(seed, part), rows)


def held_out_batches(tokenizer, seed: int, per_family: int, rows: int) -> list[Batch]:
    """All held-out exchanges, in batches of ``rows`` rows filled to at most two thirds."""
    parts, tokens = [[]], 0
    for exchange in generate(seed, per_family):
        length = len(encode(tokenizer, exchange)[0])
        tokens += length
        if tokens > rows * (SEQUENCE + 1) * 2 / 3 and parts[-1]:
            parts.append([])
            tokens = length
        parts[-1].append(exchange)
    return [pack(tokenizer, part, rows) for part in parts]
