"""Seeds, counts and the tensors of a batch, without an engine."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.serving import batch as batch_module
from sglang_hyperdflash.serving.batch import RequestState, Seeds, end_tokens


class Request:
    def __init__(self, rid="a", prompt=3, **values):
        neutral = {
            "temperature": 1.0,
            "top_k": 1 << 30,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "stop_token_ids": None,
            "sampling_seed": None,
            "logit_bias": None,
        }
        self.rid = rid
        self.sampling_params = SimpleNamespace(**neutral | values)
        self.origin_input_ids, self.output_ids = array("q", range(prompt)), array("q")
        self.eos_token_ids = {2}
        self.vocab_size, self.retraction_count = 30, 0
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5)


def places_of(requests: list[Request], slots: list[int]) -> list[tuple[int, int]]:
    return [(slot, r.retraction_count) for r, slot in zip(requests, slots, strict=True)]


def gather(requests: list[Request], slots: list[int], seeds: Seeds):
    return batch_module.gather(requests, places_of(requests, slots), seeds, "cpu")


@pytest.fixture
def deterministic():
    """A switch for the server's flag."""
    flags = SimpleNamespace(enable_deterministic_inference=False)
    with mock.patch.object(batch_module, "get_exec", lambda: SimpleNamespace(deterministic=flags)):
        yield flags


def test_a_client_s_seed_is_taken_and_a_missing_one_drawn_for_each_request(deterministic):
    seeds = Seeds(7)
    requests = [Request("a"), Request("b"), Request("a")]
    drawn = [seeds.of(r) for r in requests]
    assert len({seed for seed, _ in drawn}) == 3
    assert not any(seeded for _, seeded in drawn)
    assert [seeds.of(r) for r in requests] == drawn
    assert seeds.of(Request(sampling_seed=-(2**63))) == (-(2**63), True)


def test_a_block_that_is_drafted_again_after_a_retraction_has_other_noise(deterministic):
    """Its draft temperature may have been learnt from the round that was dropped."""
    seeds, requests = Seeds(7), [Request("a"), Request("b", sampling_seed=5)]
    first = gather(requests, [3, 4], seeds)
    for count in range(1, 5):
        for request in requests:
            request.retraction_count += 1
        assert not first.same(requests, places_of(requests, [3, 4]))
        again = gather(requests, [3, 4], seeds)
        assert again.same(requests, places_of(requests, [3, 4]))
        assert again.draws.seeds[0] != first.draws.seeds[0], count
        assert again.draws.seeds[1] == 5, "the client's"
        assert again.draws.seeded.tolist() == [False, True]


def test_ranks_draw_the_same_seeds_and_servers_others(deterministic):
    def drawn(random_seed):
        seeds = Seeds(random_seed)
        return [seeds.of(Request(rid)) for rid in "abcd"]

    assert drawn(1) == drawn(1) != drawn(2)


def test_deterministic_inference_gives_sglangs_default(deterministic):
    deterministic.enable_deterministic_inference = True
    assert Seeds(1).of(Request()) == (42, True)
    assert Seeds(1).of(Request(sampling_seed=9)) == (9, True)


def test_a_batch_is_read_once_until_its_requests_or_slots_change(deterministic):
    requests = [
        Request("a", top_k=1),
        Request("b", frequency_penalty=0.5, presence_penalty=-1.0),
        Request("c", sampling_seed=4, min_new_tokens=6, stop_token_ids={9}, prompt=8),
    ]
    batch = gather(requests, [5, 2, 7], Seeds(0))
    assert batch.same(requests, places_of(requests, [5, 2, 7]))
    assert not batch.same(requests, places_of(requests, [5, 2, 8]))
    assert not batch.same(requests[::-1], places_of(requests[::-1], [5, 2, 7]))
    assert not batch.same(requests[:2], places_of(requests[:2], [5, 2]))
    assert batch.draws.seeded.tolist() == [False, False, True]
    assert batch.draws.any_unseeded
    # Of the requests that sample: the first has no seed, but is greedy.
    assert not gather(requests[::2], [5, 7], Seeds(0)).draws.any_unseeded
    changes = batch.adjustments
    assert changes.slots.tolist() == [5, 2, 7]
    assert changes.penalties.tolist() == [[0.0, 0.0, 1.0], [0.5, -1.0, 1.0], [0.0, 0.0, 1.0]]
    assert changes.end_ids.tolist() == [[-1, -1, -1], [-1, -1, -1], [2, 5, 9]]
    assert changes.earliest.tolist()[2] == 8 + 6
    assert not batch.argmax_only
    # What no request has is not there.
    assert gather(requests[:1], [5], Seeds(0)).adjustments.tensors == (None,) * 6
    assert gather(requests[1:2], [2], Seeds(0)).adjustments.end_ids is None
    assert gather(requests[2:], [7], Seeds(0)).adjustments.penalties is None
    assert gather(requests[:1], [5], Seeds(0)).argmax_only
    # What changes a greedy request's logits makes its block more than an argmax.
    for changed in ({"repetition_penalty": 1.1}, {"logit_bias": {"7": 2.0}}):
        assert not gather([Request("d", top_k=1, **changed)], [0], Seeds(0)).argmax_only


def test_end_tokens_are_those_that_sglang_forbids():
    assert end_tokens(Request(stop_token_ids={11})) == {2, 5, 11}
    request = Request()
    request.tokenizer = None
    assert end_tokens(request) == {2}


def test_stop_ids_outside_the_vocabulary_have_no_logit_to_forbid(deterministic):
    assert end_tokens(Request(stop_token_ids={11, -1, 30, 10_000_000})) == {2, 5, 11}
    changes = gather([Request(min_new_tokens=1 << 70)], [1], Seeds(0)).adjustments
    assert changes.earliest.tolist() == [3 + batch_module.LONGEST]


class Counts:
    """Which slots were reset, and what was counted."""

    def __init__(self) -> None:
        self.resets, self.added, self.table = [], [], object()

    def reset(self, slot: int, generated) -> None:
        self.resets.append((slot, list(generated)))

    def add(self, slots, tokens, lengths) -> None:
        self.added.append((slots.tolist(), tokens.tolist(), lengths.tolist()))


def batch_of(reqs: list[Request], slots: list[int], **values) -> SimpleNamespace:
    """A ``ScheduleBatch``, as far as it is read."""
    for req, slot in zip(reqs, slots, strict=True):
        req.kv = SimpleNamespace(req_pool_idx=slot)
    lengths = torch.tensor([len(r.origin_input_ids) + len(r.output_ids) for r in reqs])
    plain = {"sampling_info": SimpleNamespace(logit_bias=None), "decoding_reqs": None}
    return SimpleNamespace(reqs=reqs, seq_lens=lengths, **plain | values)


@pytest.fixture
def tracked(deterministic):
    """The requests of a server whose counts are recorded."""
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=30))
    found = RequestState(runner, 7, "cpu")
    found.counts = Counts()
    return found


def test_counts_restart_where_a_decode_node_resumes_a_request(tracked):
    """The same request in the slot it had, without a prefill: only its retractions show it."""
    request = Request(frequency_penalty=0.5)
    for _ in range(3):
        tracked.begin(batch_of([request], [7]))
    assert tracked.counts.resets == [(7, [])]
    request.retraction_count += 1
    tracked.begin(batch_of([request], [7]))
    assert tracked.counts.resets == [(7, [])] * 2


def test_a_prefill_restarts_its_requests_and_lets_decoding_ones_go_on(tracked):
    running, new = Request("a", presence_penalty=1.0), Request("b", presence_penalty=1.0)
    plain = Request("c")
    tracked.begin(batch_of([running], [1]), prefill=True)
    running.output_ids.append(4)
    batch = batch_of([running, new, plain], [1, 2, 3], decoding_reqs=[running])
    rows = tracked.begin(batch, prefill=True)
    assert tracked.counts.resets == [(1, []), (2, [])]
    assert rows.lengths.tolist() == [4, 3, 3], "a prefill's lengths have its rows already"
    tracked.begin(batch_of([running], [1]), prefill=True)
    assert tracked.counts.resets[2:] == [(1, [4])], "after a retraction it has generated these"


def test_penalised_batches_are_counted_and_broken_rows_stay_inside_the_table(tracked):
    """A slot's count is read by a request with penalties alone, and starts anew with each."""
    reqs = [Request("a"), Request("b", frequency_penalty=0.5)]
    rows = tracked.begin(batch_of(reqs, [5, 6]))
    assert rows.counts is tracked.counts.table
    tracked.count(rows, torch.tensor([[1, 2], [3, 30]]), torch.tensor([1, 2]))
    assert tracked.counts.added == [([5, 6], [[1, 2], [3, 29]], [1, 2])]
    rows = tracked.begin(batch_of(reqs[:1], [5]))
    assert rows.counts is None
    tracked.count(rows, torch.tensor([[1, 2]]), torch.tensor([1]))
    assert len(tracked.counts.added) == 1
    tracked.begin(batch_of([Request("c", presence_penalty=1.0)], [5]))
    assert tracked.counts.resets == [(6, []), (5, [])]


def test_what_changes_from_round_to_round_is_read_anew(tracked):
    """A batch's tensors are kept; its bias, its counts and SGLang's own parameters are not."""
    penalised, waiting, plain = Request("a", frequency_penalty=0.5), Request("b"), Request("c")
    waiting.sampling_params.min_new_tokens = 4
    bias = torch.ones(1, 30)
    for reqs in ([penalised], [waiting], [penalised, waiting]):
        rows = tracked.begin(batch_of(reqs, range(len(reqs))))
        own = rows.adjustments.tensors
        assert rows.changes().tensors == (rows.counts, *own[1:])
        rows.info.logit_bias = bias
        assert rows.changes().tensors == (rows.counts, *own[1:-1], bias)
        assert rows.changes(bias=False).tensors == (rows.counts, *own[1:])
        again = tracked.begin(batch_of(reqs, range(len(reqs))))
        assert again.adjustments is rows.adjustments and again.changes().bias is None
    rows = tracked.begin(batch_of([plain], [3]))
    assert rows.changes() is None
    rows.info.logit_bias = bias
    assert rows.changes().tensors == (*(None,) * 5, bias) and rows.changes(bias=False) is None


def test_a_batch_that_samples_nothing_has_no_rows(tracked):
    assert tracked.begin(batch_of([Request()], [1])) is tracked.current is not None
    assert tracked.begin(SimpleNamespace(reqs=[], sampling_info=None)) is None
    assert tracked.current is None
