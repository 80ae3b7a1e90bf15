"""The kernels that learn the draft temperature against their reference."""

from functools import partial

import pytest
import torch

from sglang_hyperdflash.draft.propose import DRAFT_TEMPERATURES
from sglang_hyperdflash.serving.drafting.temperature import learn_reference
from tests.unit.triton_ops.gate_help import DEVICE
from triton_ops import learn_kernel
from triton_ops.gumbel import block_seeds, gumbel_noise

NAN = float("nan")
VOCABULARY = 400
BEFORE = torch.tensor([[3.0, 2, 1, 2], [1, 4, 3, 2]], dtype=torch.float64)


def a_round(bs: int, drafts: int, k: int) -> dict[str, torch.Tensor]:
    """Arguments of a round of mixed requests, up to the filters."""
    g = torch.Generator().manual_seed(bs)
    rand = partial(torch.rand, generator=g)
    ids = rand(bs, drafts, VOCABULARY).argsort(-1)[..., :k].contiguous()
    scores = torch.randn(bs, drafts, k, generator=g) * 3
    p = (scores + torch.randn(bs, drafts, k, generator=g)).softmax(-1) * rand(bs, drafts, 1)
    choice = torch.randint(0, k, (bs, drafts), generator=g)
    seeded = torch.arange(bs) % 2 == 1
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g)
    positions = torch.randint(0, 5000, (bs, 1), generator=g) + torch.arange(drafts + 1)
    lens = torch.randint(1, drafts + 2, (bs,), generator=g).int()
    # A seeded request's emitted tokens are often what its noise draws.
    streams = block_seeds(seeds, seeded, positions[:, 0]).repeat_interleave(drafts)
    noise = gumbel_noise(streams, positions[:, :-1].reshape(-1), ids.view(-1, k))
    likely = (scores.log_softmax(-1) + noise.view(bs, drafts, k)).argmax(-1, keepdim=True)
    picked = torch.where(seeded.view(bs, 1, 1), likely, choice.unsqueeze(2))
    tokens = torch.cat([ids.gather(2, picked).squeeze(2), ids[:, :1, 0]], 1)
    made = {"ids": ids, "scores": scores, "choice": choice, "p": p, "tokens": tokens}
    made |= {"accept_lens": lens, "temperatures": 0.3 + 1.2 * rand(bs)}
    made["top_ks"] = torch.randint(2, 40, (bs,), generator=g).int()
    made["top_ps"] = 0.5 + 0.6 * rand(bs).clamp(max=0.8)
    made["min_ps"] = torch.where(rand(bs) < 0.5, 0.0, 0.2 * rand(bs))
    made |= {"seeded": seeded, "seeds": seeds, "positions": positions}
    return {name: value.to(DEVICE) for name, value in made.items()}


def learnt(given: dict[str, torch.Tensor], filters=False, sequential=False) -> torch.Tensor:
    """What the kernels make of ``BEFORE``, after the comparison with the reference."""
    values, results = torch.tensor(DRAFT_TEMPERATURES, device=DEVICE), []
    for function in (learn_kernel.launch, learn_reference):
        accepted, current = BEFORE.to(DEVICE, copy=True), torch.full((2,), NAN, device=DEVICE)
        state = values, accepted, current, VOCABULARY, 50.0
        function(*given.values(), filters, sequential, *state)
        results.append((accepted, current))
    (accepted, current), (expected, best) = results
    torch.testing.assert_close(accepted, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(current, best)
    return accepted.cpu()


@pytest.mark.parametrize(
    ("sizes", "filters", "sequential"),  # requests, drafts, candidates
    [
        ((1, 1, 1), False, False),
        ((4, 6, 64), False, False),
        ((2, 9, 3), True, False),
        ((4, 3, 20), True, True),
        ((2, 2, 100), True, True),
    ],
)
def test_what_is_learnt_is_the_references(sizes, filters, sequential):
    result = learnt(a_round(*sizes), filters, sequential)
    assert sizes[0] == 1 or not (result == BEFORE).any()


def test_more_requests_than_a_program_adds_at_once(monkeypatch):
    monkeypatch.setattr(learn_kernel, "REQUESTS", 4)
    learnt(a_round(9, 1, 3))


def test_rows_that_say_nothing_do_not_stay():
    """NaN in scores or p, no mass anywhere, an impossible draft in the middle of a prefix."""
    given = a_round(6, 4, 5)
    given["seeded"][2:] = False
    given["accept_lens"][:] = 5
    given["scores"][:2, 1, 2], given["scores"][2, 2] = NAN, float("-inf")
    given["p"][3, 0], given["p"][4] = NAN, 0.0
    given["p"][5, 1, given["choice"][5, 1]] = 0.0
    for filters in (False, True):
        assert learnt(given, filters, filters).isfinite().all()


def test_greedy_and_broken_requests_teach_nothing():
    given = a_round(6, 3, 8)
    given["top_ks"][:3] = 1
    given["tokens"][3:] = VOCABULARY
    assert torch.equal(learnt(given), BEFORE)
    given["top_ks"][3:], given["tokens"][:3] = 40, 7  # now every class has one that does
    given["tokens"][5, :] = 7
    learnt(given)
