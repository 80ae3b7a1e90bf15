"""Seeds, counts and the tensors of a batch, without an engine."""

from array import array
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hyperdflash.serving import batch as batch_module
from sglang_hyperdflash.serving.batch import BatchRequests, GeneratedCounts, RequestState, Seeds


class Request(Req):
    def __init__(self, rid="a", **values):
        fields = {"eos_token_ids": {2}, "vocab_size": 30}
        super().__init__(rid, "", array("q", range(3)), SamplingParams(**values), **fields)
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5)


def places_of(requests: list[Request], slots: list[int]) -> list[tuple[int, int]]:
    return [(slot, r.retraction_count) for r, slot in zip(requests, slots, strict=True)]


def gather(requests: list[Request], slots: list[int] | None = None) -> BatchRequests:
    places = places_of(requests, slots or list(range(len(requests))))
    return batch_module.gather(requests, places, Seeds(7), "cpu")


@pytest.fixture
def deterministic():
    """A switch for the server's flag."""
    flags = SimpleNamespace(enable_deterministic_inference=False)
    with mock.patch.object(batch_module, "get_exec", lambda: SimpleNamespace(deterministic=flags)):
        yield flags


def test_a_client_s_seed_is_taken_and_a_missing_one_drawn_for_each_request(deterministic):
    """Ranks draw the same seeds, servers others."""

    def drawn(server: Seeds) -> list[tuple[int, bool]]:
        requests = [Request(rid) for rid in "aba"]
        found = [server.of(request) for request in requests]
        assert found == [server.of(request) for request in requests]
        return found

    first, second, other = drawn(Seeds(7)), drawn(Seeds(7)), drawn(Seeds(8))
    assert len({seed for seed, _ in first}) == 3 and not any(seeded for _, seeded in first)
    assert first == second != other
    assert Seeds(7).of(Request(sampling_seed=-(2**63))) == (-(2**63), True)
    deterministic.enable_deterministic_inference = True  # SGLang's default
    assert Seeds(1).of(Request()) == (42, True)
    assert Seeds(1).of(Request(sampling_seed=9)) == (9, True)


def test_a_block_that_is_drafted_again_after_a_retraction_has_other_noise(deterministic):
    """Its draft temperature may have been learnt from the round that was dropped."""
    requests = [Request("a"), Request("b", sampling_seed=5)]
    first = gather(requests)
    for count in range(1, 5):
        for request in requests:
            request.retraction_count += 1
        assert not first.same(requests, places_of(requests, [0, 1]))
        again = gather(requests)
        assert again.draws.seeds[0] != first.draws.seeds[0], count
        assert again.draws.seeds[1] == 5, "the client's"
        assert again.draws.client_seeded.tolist() == [False, True]


def test_a_batch_is_read_once_until_its_requests_or_slots_change(deterministic):
    changed = Request("b", frequency_penalty=0.5, presence_penalty=-1.0)
    requests = [Request("a", top_k=1), changed, Request("c", sampling_seed=4)]
    batch = gather(requests, [5, 2, 7])
    assert batch.same(requests, places_of(requests, [5, 2, 7]))
    assert not batch.same(requests, places_of(requests, [5, 2, 8]))
    assert not batch.same(requests[::-1], places_of(requests[::-1], [5, 2, 7]))
    assert not batch.same(requests[:2], places_of(requests[:2], [5, 2]))
    assert batch.draws.client_seeded.tolist() == [False, False, True] and batch.draws.any_by_block
    # Of the requests that sample: the first has no seed, but is greedy.
    assert not gather(requests[::2]).draws.any_by_block
    # What changes a greedy request's logits makes its block more than an argmax.
    assert gather(requests[:1]).argmax_only and not batch.argmax_only
    for changed in ({"repetition_penalty": 1.1}, {"logit_bias": {"7": 2.0}}):
        assert not gather([Request("d", top_k=1, **changed)]).argmax_only


def test_end_tokens_are_those_that_sglang_forbids(deterministic):
    request = Request(stop_token_ids={11, -1, 30, 10_000_000}, min_new_tokens=1 << 70)
    assert batch_module.end_tokens(request) == {2, 5, 11}
    assert gather([request]).adjustments.earliest.tolist() == [3 + batch_module.LONGEST]
    request.tokenizer = None
    assert batch_module.end_tokens(request) == {2, 11}


def batch_of(reqs: list[Request], slots: list[int], decoding: list | None = None):
    """A ``ScheduleBatch``, as far as it is read."""
    for req, slot in zip(reqs, slots, strict=True):
        req.kv = SimpleNamespace(req_pool_idx=slot)
    lengths = torch.tensor([len(r.origin_input_ids) + len(r.output_ids) for r in reqs])
    info = SimpleNamespace(logit_bias=None)
    return SimpleNamespace(reqs=reqs, sampling_info=info, decoding_reqs=decoding, seq_lens=lengths)


@pytest.fixture
def tracked(deterministic):
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=30))
    state = RequestState(runner, 7, "cpu")
    state.counts = GeneratedCounts(8, 30, "cpu")
    return state


def test_counts_restart_where_a_decode_node_resumes_a_request(tracked):
    """The same request in the slot it had, without a prefill: only its retractions show it."""
    request, row = Request(frequency_penalty=0.5), tracked.counts.table[7]
    for retractions, goes_on in ((0, False), (0, True), (1, False), (1, True)):
        row.fill_(3)
        request.retraction_count = retractions
        tracked.begin(batch_of([request], [7]))
        assert row.eq(3).all() if goes_on else not row.any()


def test_a_prefill_restarts_its_requests_and_lets_decoding_ones_go_on(tracked):
    running, new = Request("a", presence_penalty=1.0), Request("b", presence_penalty=1.0)
    tracked.begin(batch_of([running], [1]), prefill=True)
    running.output_ids.append(4)
    tracked.counts.table.fill_(1)
    batch = batch_of([running, new, Request("c")], [1, 2, 3], decoding=[running])
    rows = tracked.begin(batch, prefill=True)
    assert tracked.counts.table.sum(1).tolist()[:4] == [30, 30, 0, 30]
    assert rows.lengths.tolist() == [4, 3, 3], "a prefill's lengths have its rows already"
    tracked.begin(batch_of([running], [1]), prefill=True)
    table = tracked.counts.table
    assert table[1].nonzero().tolist() == [[4]], "after a retraction it has generated these"


def test_penalised_batches_are_counted_and_broken_rows_stay_inside_the_table(tracked):
    """A slot's count is read by a request with penalties alone, and starts anew with each."""
    reqs, table = [Request("a"), Request("b", frequency_penalty=0.5)], tracked.counts.table
    rows = tracked.begin(batch_of(reqs, [5, 6]))
    assert rows.counts is table
    tracked.count(rows, torch.tensor([[1, 2], [3, 30]]), torch.tensor([1, 2]))
    assert table.nonzero().tolist() == [[5, 1], [6, 3], [6, 29]]
    rows = tracked.begin(batch_of(reqs[:1], [5]))
    tracked.count(rows, torch.tensor([[1, 2]]), torch.tensor([1]))
    assert rows.counts is None and table.sum() == 3
    tracked.begin(batch_of([Request("c", presence_penalty=1.0)], [5]))
    assert table.nonzero().tolist() == [[6, 3], [6, 29]]
    assert tracked.begin(SimpleNamespace(reqs=[], sampling_info=None)) is tracked.current is None
