"""Custom logit processors see, at every position, the tokens that position follows."""

from __future__ import annotations

import weakref
from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving.processors import Outputs, _at, apply_processors, keeps_notes


class Request:
    def __init__(self, output_ids, processor="p"):
        self.origin_input_ids, self.output_ids = array("q", [1, 2]), array("q", output_ids)
        self.custom_logit_processor = processor


class Recorder:
    """Writes what it was told into the logits."""

    def __init__(self):
        self.seen = []

    def __call__(self, logits, parameters):
        for row, given in zip(logits, parameters, strict=True):
            req = given.get("__req__")
            self.seen.append(None if req is None else list(req.origin_input_ids + req.output_ids))
            row[0] = given["mark"]
        return logits


def information(rows, parameters, processor):
    entry = SimpleNamespace(processor=processor, rows=rows, indices=torch.tensor(rows))
    return SimpleNamespace(custom_logit_processor={1: entry}, custom_params=parameters)


def test_each_position_sees_the_drafts_before_it_and_others_are_untouched():
    requests = [Request([7]), Request([], None), Request([8, 9])]
    outputs, recorder = Outputs(), Recorder()
    for request in (requests[0], requests[2]):
        outputs.enter(request)
    parameters = [{"__req__": requests[0], "mark": 5.0}, None, {"mark": 6.0}]
    logits = torch.zeros(9, 4)
    drafts = torch.tensor([[30, 31], [0, 0], [40, 41]])
    apply_processors(logits, information([0, 2], parameters, recorder), requests, outputs, drafts)
    assert recorder.seen[:3] == [[1, 2, 7], [1, 2, 7, 30], [1, 2, 7, 30, 31]]
    assert recorder.seen[3:] == [None] * 3
    assert logits[:, 0].tolist() == [5.0] * 3 + [0.0] * 3 + [6.0] * 3
    assert float(logits[:, 1:].abs().sum()) == 0.0


def test_a_request_s_lengths_are_those_of_its_position():
    class EndsAtFour:
        def __call__(self, logits, parameters):
            for row, given in zip(logits, parameters, strict=True):
                req = given["__req__"]
                assert req.output_ids_through_stop == req.output_ids
                row[:] = req.seqlen - len(req.origin_input_ids)
            return logits

    request, outputs = Request([7]), Outputs()
    # What SGLang's own request says of itself: the host's last look.
    request.seqlen, request.output_ids_through_stop = 3, array("q", [7])
    outputs.enter(request)
    logits = torch.zeros(3, 4)
    info = information([0], [{"__req__": request}], EndsAtFour())
    apply_processors(logits, info, [request], outputs, torch.tensor([[8, 5]]))
    assert logits[:, 0].tolist() == [1, 2, 3]


def test_outputs_are_the_committed_tokens_though_the_host_lags_behind():
    request, other = Request([7]), Request([], None)
    outputs = Outputs()
    outputs.enter(request)
    tokens = torch.tensor([[11, 12, 13], [1, 1, 1]])
    outputs.add([request, other], tokens, torch.tensor([2, 3]))
    assert outputs.of(request).tolist() == [7, 11, 12]
    # Retracted: the host knows all, and what was in flight is dropped.
    request.output_ids = array("q", [7, 11])
    outputs.enter(request)
    assert outputs.of(request).tolist() == [7, 11]


def test_impossible_drafts_cannot_end_the_server():
    """A processor walks its states over the tokens; a draft that it forbids is none of them."""
    states = {7: 8, 8: 9}

    class Walk:
        def __call__(self, logits, parameters):
            for row, given in zip(logits, parameters, strict=True):
                for token in given["__req__"].output_ids:
                    following = states[token]
                row[:] = float("-inf")
                row[following % 4] = 0.0
            return logits

    request, outputs = Request([7]), Outputs()
    outputs.enter(request)
    information_ = information([0], [{"__req__": request}], Walk())
    logits = torch.zeros(3, 4)
    apply_processors(logits, information_, [request], outputs, torch.tensor([[8, 5]]))
    assert logits[0].argmax() == 0 and logits[1].argmax() == 1
    assert logits[:2].isinf().sum() == 6
    assert logits[2].isnan().all()


def test_a_processor_may_not_note_things_on_the_request():
    def counts(logits, parameters):
        parameters[0]["__req__"]._calls = 1
        return logits

    request, outputs = Request([7]), Outputs()
    outputs.enter(request)
    given = [{"__req__": request}]
    with pytest.raises(AttributeError, match="_calls cannot be set"):
        counts(torch.zeros(1, 4), [_at(given[0], request, outputs, [])])
    logits = torch.zeros(1, 4)
    none = torch.empty(1, 0, dtype=torch.int64)
    apply_processors(logits, information([0], given, counts), [request], outputs, none)
    assert logits.isnan().all() and not hasattr(request, "_calls")


class Notes:
    """Counts its calls in both places that a client's request has."""

    stateful = True

    def __call__(self, logits, parameters):
        for row, given in zip(logits, parameters, strict=True):
            req = given["__req__"]
            given["calls"] = given.get("calls", 0) + 1
            req._calls = getattr(req, "_calls", 0) + 1
            if given.get("fails"):
                raise ValueError("a client's own error")
            row[0], row[1], row[2] = given["calls"], req._calls, len(req.output_ids)
        return logits


def test_a_processor_with_notes_is_called_once_a_token_and_its_notes_stay():
    requests, outputs = [Request([7]), Request([8]), Request([9])], Outputs()
    parameters = [{"__req__": weakref.proxy(request)} for request in requests]
    parameters[1]["fails"] = True
    information_ = information([0, 1, 2], parameters, Notes())
    none = torch.empty(3, 0, dtype=torch.int64)
    for call in (1, 2, 3):
        logits = torch.zeros(3, 4)
        apply_processors(logits, information_, requests, outputs, none)
        # The host's tokens lag behind; what the worker has committed does not.
        assert logits[[0, 2], :3].tolist() == [[call, call, call]] * 2
        assert logits[1].isnan().all(), "one client's error is another's"
        outputs.add(requests, torch.full((3, 1), 11), torch.ones(3, dtype=torch.int64))
    assert [request._calls for request in requests] == [3, 3, 3]
    assert requests[0].output_ids.tolist() == [7]
    # Nothing that the notes hold keeps a request alive.
    gone = weakref.ref(requests.pop(0))
    assert gone() is None


def test_only_a_class_that_says_so_keeps_notes():
    assert keeps_notes(information([0], [{}], Notes()))
    assert not keeps_notes(information([0], [{}], Recorder()))
    assert not keeps_notes(SimpleNamespace(custom_logit_processor=None))
