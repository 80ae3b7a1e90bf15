"""Sampling masks hold what a token was drawn from, of rounds and of prefills."""

from types import SimpleNamespace

import torch

from sglang_hyperdflash.draft.adjust import Adjustments
from sglang_hyperdflash.serving import batch as batch_module
from sglang_hyperdflash.serving.batch import BatchRequests
from sglang_hyperdflash.serving.verification import prefill, verifier
from sglang_hyperdflash.serving.verification.exact import Committed, weights_of
from tests.unit.serving.markov import verifier_of


def requests_of(monkeypatch, backend: str, min_ps: list[float], **filters) -> BatchRequests:
    """Requests of a server with this sampling backend; ``info`` is as SGLang has it."""
    kernel = SimpleNamespace(sampling_backend=backend)
    monkeypatch.setattr(batch_module, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    info = SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.ones(len(min_ps), 1),
        min_ps=torch.tensor(min_ps),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=any(min_ps),
        sampling_mask_batch_indices=torch.tensor([0]),
        sampling_mask_top_ks=[2],
        sampling_support_logprobs_capture_indices=None,
        **{name: torch.tensor(values) for name, values in filters.items()},
    )
    classes = 0, len(min_ps)
    return BatchRequests([], [], SimpleNamespace(), False, Adjustments(), classes, info)


PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).repeat(3, 1)


def test_a_sampling_mask_holds_what_is_drawn_from(monkeypatch):
    """Both shares are of the whole mass; SGLang's function takes top-p of what top-k has left.

    A broken row's token has no logit: the vocabulary's last one is looked up, for logprobs too.
    """
    rows, asked = requests_of(monkeypatch, "pytorch", [0.0], top_ks=[2], top_ps=[0.5]), []
    monkeypatch.setattr(
        verifier, "compute_spec_logprobs", lambda *given, **_: asked.append(given[2].tolist())
    )
    committed = Committed(torch.tensor([[0, 1, 4]]), torch.tensor([3]), torch.tensor([0]))
    output = SimpleNamespace(next_token_logits=PROBS.log())
    verifier_of(4).add_logprobs(SimpleNamespace(return_logprob=True), output, committed, rows)
    assert asked == [[0, 1, 3]]
    mask, drawn = output.sampling_mask_output, weights_of(PROBS.log().unsqueeze(0), rows.sampling)
    assert mask.lengths.tolist() == (drawn > 0).sum(-1).tolist() == [[2, 2, 2]]
    expected = torch.tensor([[4 / 7, 3 / 7, 0.0]]).log()
    torch.testing.assert_close(mask.selected_logprobs, expected)


def test_a_prefill_s_sampling_mask_is_of_its_own_row_and_outlives_a_broken_one(monkeypatch):
    """SGLang's depends on another request's min-p, and its draw raises at a row of NaN."""
    filters = {"top_ks": [2, 4, 4], "top_ps": [0.5, 1.0, 1.0]}
    requests = requests_of(monkeypatch, "flashinfer", [0.0, 0.1, 0.0], **filters)
    requests.draws.client_seeded, probs, drawn = (
        torch.zeros(3, dtype=torch.bool),
        PROBS.clone(),
        set(),
    )
    probs[2] = torch.nan
    sampler = prefill.PrefillSampler(None, SimpleNamespace(current=requests), verifier_of(4))
    sampler.read(probs.log(), sampled=True)
    monkeypatch.setattr(prefill, "_sampler", sampler)
    given = None, None, probs, requests.info, torch.arange(3), False
    for seed in range(200):
        requests.draws.seeds = torch.tensor([seed, 1, 2])
        tokens, mask = prefill.draw_prefill(*given)
        drawn.add(int(tokens[0]))
        assert (mask.weights[0] > 0).tolist() == [True, True, False, False]
        assert mask.batch_rows.tolist() == [0]
    assert drawn == {0, 1}
    requests.info.sampling_mask_batch_indices = None
    assert prefill.draw_prefill(*given)[1] is None
