"""Sampling masks hold what a token was drawn from, of rounds and of prefills."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_hyperdflash.draft.adjust import Adjustments
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.serving import batch as batch_module
from sglang_hyperdflash.serving.batch import BatchRequests
from sglang_hyperdflash.serving.verification import prefill
from sglang_hyperdflash.serving.verification.exact import Committed, weights_of
from sglang_hyperdflash.serving.verification.verifier import Verifier


def sampled(monkeypatch, backend: str, **values) -> SimpleNamespace:
    """SGLang's ``SamplingBatchInfo`` of a server with this sampling backend."""
    kernel = SimpleNamespace(sampling_backend=backend)
    monkeypatch.setattr(batch_module, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    given = {
        "is_all_greedy": False,
        "need_top_k_sampling": True,
        "need_top_p_sampling": True,
        "need_min_p_sampling": False,
        "sampling_mask_batch_indices": torch.tensor([0]),
        "sampling_support_logprobs_capture_indices": None,
    }
    return SimpleNamespace(**given | values)


def sampling_of(info: SimpleNamespace) -> Sampling:
    """As a batch's requests have it."""
    return BatchRequests([], [], None, False, Adjustments(), (0, 1), info).sampling


def test_a_sampling_mask_holds_what_is_drawn_from(monkeypatch):
    """Both shares are of the whole mass; SGLang's function takes top-p of what top-k has left."""
    info = sampled(
        monkeypatch,
        "pytorch",
        temperatures=torch.ones(1, 1),
        top_ks=torch.tensor([2]),
        top_ps=torch.tensor([0.5]),
        min_ps=torch.zeros(1),
        sampling_mask_top_ks=[2],
    )
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(3, 1)
    verifier = object.__new__(Verifier)
    verifier.vocabulary = 4
    verifier.renorm = None
    rows = SimpleNamespace(info=info, sampling=sampling_of(info), all_greedy=False)
    given = torch.tensor([[0, 1, 0]]), torch.tensor([3]), torch.tensor([0])
    committed = Committed(*given)
    output = SimpleNamespace(next_token_logits=logits)
    verifier.add_logprobs(SimpleNamespace(return_logprob=False), output, committed, rows)
    mask = output.sampling_mask_output
    drawn = weights_of(logits.unsqueeze(0), rows.sampling)
    assert (drawn > 0).sum(-1).tolist() == [[2, 2, 2]]
    assert mask.lengths.tolist() == [[2, 2, 2]]
    expected = torch.tensor([[4 / 7, 3 / 7, 4 / 7]]).log()
    torch.testing.assert_close(mask.selected_logprobs, expected)


def test_a_prefill_s_sampling_mask_is_of_its_own_row_and_outlives_a_broken_one(monkeypatch):
    """SGLang's depends on another request's min-p, and its draw raises at a row of NaN."""
    info = sampled(
        monkeypatch,
        "flashinfer",
        temperatures=torch.ones(3, 1),
        top_ks=torch.tensor([2, 4, 4]),
        top_ps=torch.tensor([0.5, 1.0, 1.0]),
        min_ps=torch.tensor([0.0, 0.1, 0.0]),
        need_min_p_sampling=True,
    )
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).repeat(3, 1)
    probs[2] = torch.nan
    draws = SimpleNamespace(seeds=None, seeded=torch.zeros(3, dtype=torch.bool))
    verifier = object.__new__(Verifier)
    verifier.renorm = None
    state = SimpleNamespace(current=SimpleNamespace(draws=draws, sampling=sampling_of(info)))
    sampler = prefill.PrefillSampler(None, state, verifier)
    sampler.read(probs.log(), sampled=True)
    monkeypatch.setattr(prefill, "_sampler", sampler)
    given = None, None, probs, info, torch.arange(3), False
    drawn = set()
    for seed in range(200):
        draws.seeds = torch.tensor([seed, 1, 2])
        tokens, mask = prefill.draw_prefill(*given)
        drawn.add(int(tokens[0]))
        assert (mask.weights[0] > 0).tolist() == [True, True, False, False]
        assert mask.batch_rows.tolist() == [0]
    assert drawn == {0, 1}
    info.sampling_mask_batch_indices = None
    assert prefill.draw_prefill(*given)[1] is None
