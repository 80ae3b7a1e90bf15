"""Custom logit processors, called for every position of a block with what that position follows.

A processor that asks for ``__req__`` sees the request as it would be there: SGLang's own call
gives all rows of a block the same, and under overlap scheduling an outdated, list of tokens.

One whose class says ``stateful = True`` keeps notes between calls. It must be called once a token,
as without speculation, so a batch with such a request has rounds of one row (``WidthWorker``).
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

REQUEST = "__req__"

logger = logging.getLogger(__name__)


class RequestAt:
    """A request whose ``output_ids`` end at one position; everything else is the request's.

    Raises:
        AttributeError: an attribute is set. A position may be asked for several times, or for a
            draft that is then refused: what a processor notes on it would count wrong.
    """

    def __init__(self, request: Any, output_ids: array) -> None:
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "output_ids", output_ids)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"custom logit processor: __req__.{name} cannot be set under HYPERDFLASH, which calls "
            "a processor for drafts, too. Compute it from __req__.output_ids, or set stateful = "
            "True in the processor's class to be called once a token, without drafts."
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def output_ids_through_stop(self) -> array:
        """Nothing has ended the request at a position that is still to be drawn."""
        return self.output_ids

    @property
    def seqlen(self) -> int:
        """Tokens of the context, the prompt's with it."""
        return len(self.origin_input_ids) + len(self.output_ids)


class RequestNow(RequestAt):
    """The same for a processor that keeps notes: what it sets is set on the request."""

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._request, name, value)


def keeps_notes(sampling_info: Any) -> bool:
    """Whether a batch has a request whose processor must be called once a token."""
    entries = (sampling_info.custom_logit_processor or {}).values()
    return any(_stateful(entry) for entry in entries)


def _stateful(entry: Any) -> bool:
    return bool(getattr(entry.processor, "stateful", False))


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

    Rows whose processor raises become NaN: a draft may be what the processor itself forbids, or
    lie behind an answer's end. One that is reached ends its request, as any broken row does.
    """
    block = drafts.shape[1] + 1
    ahead = drafts.tolist()
    offsets = torch.arange(block, device=logits.device)
    for entry in sampling_info.custom_logit_processor.values():
        at = (entry.indices.unsqueeze(1) * block + offsets).flatten()
        if block == 1 and _stateful(entry):
            # Once a row, whatever raises: a second call would count twice.
            parameters = [
                _now(sampling_info.custom_params[row], requests[row], outputs) for row in entry.rows
            ]
            result = _by_row(entry.processor, logits.index_select(0, at), parameters)
            logits.index_copy_(0, at, result.to(logits.dtype))
            continue
        places = [(row, ahead[row][:k]) for row in entry.rows for k in range(block)]

        def given(row: int, before: list[int]) -> Any:
            return _at(sampling_info.custom_params[row], requests[row], outputs, before)

        try:
            result = entry.processor(logits.index_select(0, at), [given(*p) for p in places])
        except Exception:  # a client's own code; it may have written into rows and parameters
            parameters = [given(*p) for p in places]
            result = _by_row(entry.processor, logits.index_select(0, at), parameters)
        logits.index_copy_(0, at, result.to(logits.dtype))


def _by_row(processor: Any, rows: torch.Tensor, parameters: list) -> torch.Tensor:
    """Each of ``rows [n, V]`` by a call of its own; NaN where that raises."""
    results = []
    for row, given in zip(rows.split(1), parameters, strict=True):
        try:
            results.append(processor(row, [given]))
        except Exception:  # as above
            logger.debug("HYPERDFLASH: a custom logit processor raised", exc_info=True)
            results.append(torch.full_like(row, torch.nan))
    return torch.cat(results)


def _at(parameters: Any, request: Any, outputs: Outputs, drafts: list[int]) -> Any:
    if not isinstance(parameters, dict) or REQUEST not in parameters:
        return parameters
    return {**parameters, REQUEST: RequestAt(request, outputs.of(request) + array("q", drafts))}


def _now(parameters: Any, request: Any, outputs: Outputs) -> Any:
    """The client's own ``parameters``, which keep what the processor notes there."""
    if isinstance(parameters, dict) and REQUEST in parameters:
        # Weak, as SGLang's own: the request holds these parameters.
        parameters[REQUEST] = RequestNow(weakref.proxy(request), outputs.of(request)[:])
    return parameters
