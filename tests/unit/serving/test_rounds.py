"""Seeds, the tensors of a batch, and the draft head inside a CUDA graph, without an engine."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch

from sglang_hyperdflash.serving import draft_sampler, rounds, sampled_worker
from sglang_hyperdflash.serving.rounds import Seeds, end_tokens, gather


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
        }
        self.rid = rid
        self.sampling_params = SimpleNamespace(**neutral | values)
        self.origin_input_ids, self.output_ids = array("q", range(prompt)), array("q")
        self.eos_token_ids = {2}
        self.vocab_size, self.retraction_count = 30, 0
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5)


@pytest.fixture
def deterministic():
    """A switch for the server's flag."""
    flags = SimpleNamespace(enable_deterministic_inference=False)
    with mock.patch.object(rounds, "get_exec", lambda: SimpleNamespace(deterministic=flags)):
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
    first = gather(requests, [3, 4], seeds, "cpu")
    for count in range(1, 5):
        for request in requests:
            request.retraction_count += 1
        assert not first.same(requests, [3, 4])
        again = gather(requests, [3, 4], seeds, "cpu")
        assert again.same(requests, [3, 4])
        assert again.draws.seeds[0] != first.draws.seeds[0], count
        assert again.draws.seeds[1] == 5, "the client's"
        assert again.draws.seeded.tolist() == [False, True]


def test_a_request_has_moved_into_a_slot_that_it_did_not_have_or_lost_by_a_retraction():
    worker = object.__new__(sampled_worker.SampledWorker)
    worker._places = WeakKeyDictionary()
    a, b, c = Request("a"), Request("b"), Request("c")
    assert worker._moved([a, b], [5, 2]) == [True, True]
    assert worker._moved([b, a, c], [2, 5, 7]) == [False, False, True]  # another order, one more
    assert worker._moved([c, b], [5, 2]) == [True, False]  # a has ended, c took its slot
    b.retraction_count += 1
    assert worker._moved([b], [2]) == [True]  # another may have been there


def test_a_request_that_has_just_finished_runs_once_more_in_its_old_slot():
    worker = object.__new__(sampled_worker.SampledWorker)
    worker._places = WeakKeyDictionary()
    request = Request("a")
    request.kv = SimpleNamespace(req_pool_idx=5)
    assert worker._slot(request) == 5
    worker._moved([request], [5])
    request.kv.req_pool_idx = None
    assert worker._slot(request) == 5


def test_ranks_draw_the_same_seeds_and_servers_others(deterministic):
    def drawn(random_seed):
        seeds = Seeds(random_seed)
        return [seeds.of(Request(rid)) for rid in "abcd"]

    assert drawn(1) == drawn(1) != drawn(2)


def test_ranks_of_two_nodes_draw_the_same_seeds(deterministic, monkeypatch):
    """Each node's launcher draws a random_seed of its own; SGLang's workers agree on rank 0's."""

    def started(worker, server_args, gpu_id, nccl_port, target_worker) -> None:
        worker._target_worker, worker.device = target_worker, "cpu"
        worker.draft_model = SimpleNamespace(dependency=None)

    monkeypatch.setattr(sampled_worker.WindowedWorker, "__init__", started)
    monkeypatch.setattr(sampled_worker.sampling_seams, "serve", lambda worker: None)
    runner = SimpleNamespace(
        model=SimpleNamespace(lm_head=None), model_config=SimpleNamespace(vocab_size=30)
    )
    drawn = []
    for own in (11, 12):
        target = SimpleNamespace(model_runner=runner, random_seed=5)
        arguments = SimpleNamespace(random_seed=own)
        worker = sampled_worker.SampledWorker(arguments, 0, 0, target)
        drawn.append([worker.seeds.of(Request(rid)) for rid in "abcd"])
    assert drawn[0] == drawn[1]


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
    batch = gather(requests, [5, 2, 7], Seeds(0), "cpu")
    assert batch.same(requests, [5, 2, 7])
    assert not batch.same(requests, [5, 2, 8])
    assert not batch.same(requests[::-1], [5, 2, 7])
    assert not batch.same(requests[:2], [5, 2])
    assert batch.draws.seeded.tolist() == [False, False, True]
    assert (batch.draws.any_seeded, batch.draws.any_unseeded) == (True, True)
    assert batch.draws.any_greedy
    assert not gather(requests[1:], [2, 7], Seeds(0), "cpu").draws.any_greedy
    assert batch.penalties.rows.tolist() == [1]
    assert batch.penalties.slots.tolist() == [2]
    assert batch.penalties.presence.tolist() == [[-1.0]]
    assert batch.ends.rows.tolist() == [2]
    assert batch.ends.ids.tolist() == [[2, 5, 9]]
    assert batch.ends.prompts.tolist() == [8]
    assert not batch.greedy
    assert gather(requests[:1], [5], Seeds(0), "cpu").greedy
    # A greedy request's penalties make its block more than an argmax.
    penalised = [Request("d", top_k=1, repetition_penalty=1.1)]
    assert not gather(penalised, [0], Seeds(0), "cpu").greedy


def test_end_tokens_are_those_that_sglang_forbids():
    assert end_tokens(Request(stop_token_ids={11})) == {2, 5, 11}
    request = Request()
    request.tokenizer = None
    assert end_tokens(request) == {2}


def test_stop_ids_outside_the_vocabulary_have_no_logit_to_forbid(deterministic):
    assert end_tokens(Request(stop_token_ids={11, -1, 30, 10_000_000})) == {2, 5, 11}
    ends = gather([Request(min_new_tokens=1 << 70)], [1], Seeds(0), "cpu").ends
    assert ends.minimum.tolist() == [rounds.LONGEST]


def test_counts_start_anew_where_a_decode_node_resumes_a_request():
    """The same request in the slot it had, without a prefill: only its retractions tell."""
    request = Request(frequency_penalty=0.5)
    resets = []
    worker = object.__new__(sampled_worker.SampledWorker)
    worker._places = WeakKeyDictionary()
    worker._info = SimpleNamespace(has_custom_logit_processor=False)
    worker.requests = SimpleNamespace(mine=[(0, request)], reqs=[request], slots=[7])
    worker._counts = SimpleNamespace(reset=lambda slot, ids: resets.append(slot))
    for _ in range(3):
        worker._start_counting(worker._moved([request], [7]))
    assert resets == [7]
    request.retraction_count += 1
    worker._start_counting(worker._moved([request], [7]))
    assert resets == [7, 7]


def test_the_head_in_the_graph_leaves_candidates_and_draws_when_read():
    logits = torch.randn(6, 30)
    logits[2, [4, 9]] = 9.0  # a tie: the lower id, as argmax has it
    calls = []
    worker = SimpleNamespace(
        block_size=4,
        num_candidates=8,
        device="cpu",
        batch_size=2,
        dependency=None,
        requests=SimpleNamespace(greedy=True),
        draw_drafts=lambda found: calls.append(found) or torch.arange(6),
    )

    def topk(hidden, lm_head, k):
        values, ids = logits.topk(k, dim=-1)
        if ids[2, 0] == 4:  # the other order of the tie
            ids[2, :2] = ids[2, :2].flip(0)
        return ids, values, None

    sampler = draft_sampler.CandidateSampler(worker, None, 5)
    with mock.patch.object(draft_sampler, "candidate_topk", topk):
        sampler(torch.zeros(8, 16))
    assert torch.equal(sampler.out[:6], logits.argmax(-1))
    assert not calls
    worker.requests.greedy = False
    assert sampler.out.tolist() == list(range(6))
    (found,) = calls
    assert torch.equal(logits.view(2, 3, 30).gather(2, found.ids), found.scores)
    assert found.scores.shape == (2, 3, 8) and found.gates is None
