"""Custom logit processors, called for every position of a block with what that position follows.

A processor that asks for ``__req__`` sees the request as it would be there: SGLang's own call
gives all rows of a block the same, and under overlap scheduling an outdated, list of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

REQUEST = "__req__"


class RequestAt:
    """A request whose ``output_ids`` end at one position; everything else is the request's."""

    def __init__(self, request: Any, output_ids: array) -> None:
        self._request = request
        self.output_ids = output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class Outputs:
    """Tokens that requests with a custom logit processor have generated, on the host.

    Reading them back costs such batches one wait for the device a round.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, array] = WeakKeyDictionary()

    def enter(self, request: Any) -> None:
        """A request is prefilled: the host knows all it has generated."""
        self._known[request] = array("q", request.output_ids)

    def of(self, request: Any) -> array:
        """Tokens so far; of a request that was never prefilled here, the host's."""
        if request not in self._known:
            self.enter(request)
        return self._known[request]

    def add(self, requests: Sequence[Any], tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """The first ``lengths [bs]`` of ``tokens [bs, B]`` were generated."""
        rows = zip(requests, tokens.tolist(), lengths.tolist(), strict=True)
        for request, row, length in rows:
            if request.custom_logit_processor is not None:
                self.of(request).extend(row[:length])


def apply_processors(
    logits: torch.Tensor,
    sampling_info: Any,
    requests: Sequence[Any],
    outputs: Outputs,
    drafts: torch.Tensor,
) -> None:
    """Call every processor on its rows of ``logits [bs * B, V]``, in place.

    Seam: ``layers/sampler.py: apply_custom_logit_processor``, whose entries it reads.

    Args:
        drafts: ``[bs, B - 1]`` int64: row k of a block follows the first k.
    """
    block = drafts.shape[1] + 1
    ahead = drafts.tolist()
    offsets = torch.arange(block, device=logits.device)
    for entry in sampling_info.custom_logit_processor.values():
        at = (entry.indices.unsqueeze(1) * block + offsets).flatten()
        parameters = [
            _at(sampling_info.custom_params[row], requests[row], outputs, ahead[row][:k])
            for row in entry.rows
            for k in range(block)
        ]
        result = entry.processor(logits.index_select(0, at), parameters)
        logits.index_copy_(0, at, result.to(logits.dtype))


def _at(parameters: Any, request: Any, outputs: Outputs, drafts: list[int]) -> Any:
    if not isinstance(parameters, dict) or REQUEST not in parameters:
        return parameters
    return {**parameters, REQUEST: RequestAt(request, outputs.of(request) + array("q", drafts))}
