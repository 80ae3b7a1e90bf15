"""The kernels that learn the draft temperature against their reference."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft.propose import DRAFT_TEMPERATURES
from sglang_hyperdflash.serving.drafting.temperature import learn_reference
from triton_ops import learn_kernel
from triton_ops.gumbel import block_seeds, gumbel_noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


def a_round(bs: int, drafts: int, k: int, vocabulary: int = 400, seed: int = 0, **changes):
    """Arguments of a round of mixed requests, up to the filters."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g)

    ids = torch.stack([torch.randperm(vocabulary, generator=g)[:k] for _ in range(bs * drafts)])
    ids = ids.view(bs, drafts, k)
    scores = torch.randn(bs, drafts, k, generator=g) * 3
    p = (scores + torch.randn(bs, drafts, k, generator=g)).softmax(-1) * rand(bs, drafts, 1)
    choice = torch.randint(0, k, (bs, drafts), generator=g)
    seeded = rand(bs) < 0.5
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g)
    positions = torch.randint(0, 5000, (bs, 1), generator=g) + torch.arange(drafts + 1)
    top_ks = torch.where(rand(bs) < 0.2, 1, torch.randint(2, 40, (bs,), generator=g)).int()
    lens = torch.randint(1, drafts + 2, (bs,), generator=g).int()
    tokens = torch.cat([ids.gather(2, choice.unsqueeze(2)).squeeze(2), ids[:, :1, 0]], 1)
    # A seeded request's emitted tokens are often what its noise draws.
    own = block_seeds(seeds, seeded, positions[:, 0]).repeat_interleave(drafts)
    noise = gumbel_noise(own, positions[:, :-1].reshape(-1), ids.view(-1, k))
    likely = (scores.log_softmax(-1) + noise.view(bs, drafts, k)).argmax(-1, keepdim=True)
    tokens[:, :-1] = torch.where(
        seeded.unsqueeze(1), ids.gather(2, likely).squeeze(2), tokens[:, :-1]
    )
    broken = (rand(bs) < 0.1).nonzero().squeeze(-1)
    tokens[broken, lens[broken].long() - 1] = vocabulary
    made = {
        "ids": ids,
        "scores": scores,
        "choice": choice,
        "p": p,
        "tokens": tokens,
        "accept_lens": lens,
        "temperatures": 0.3 + 1.2 * rand(bs),
        "top_ks": top_ks,
        "top_ps": 0.5 + 0.6 * rand(bs).clamp(max=0.8),
        "min_ps": torch.where(rand(bs) < 0.5, 0.0, 0.2 * rand(bs)),
        "seeded": seeded,
        "seeds": seeds,
        "positions": positions,
    }
    return {name: value.to(DEVICE) for name, value in (made | changes).items()}


def compared(given: dict[str, torch.Tensor], filters=False, sequential=False, memory=50.0):
    """What both make of a state that has learnt before; asserts that they agree."""
    values, found = torch.tensor(DRAFT_TEMPERATURES, device=DEVICE), []
    for function in (learn_kernel.launch, learn_reference):
        accepted = torch.tensor([[3.0, 2, 1, 2], [1, 4, 3, 2]], dtype=torch.float64, device=DEVICE)
        current = torch.full((2,), NAN, device=DEVICE)
        arguments = *given.values(), filters, sequential, values, accepted, current, 400, memory
        function(*arguments)
        found.append((accepted, current))
    (accepted, current), (expected, best) = found
    torch.testing.assert_close(accepted, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(current, best)
    return accepted


@pytest.mark.parametrize(("bs", "drafts", "k"), [(1, 1, 1), (2, 9, 3), (7, 6, 64), (4, 3, 100)])
@pytest.mark.parametrize(("filters", "sequential"), [(False, False), (True, False), (True, True)])
def test_what_is_learnt_is_the_references(bs, drafts, k, filters, sequential):
    before = torch.tensor([[3.0, 2, 1, 2], [1, 4, 3, 2]], dtype=torch.float64, device=DEVICE)
    found = compared(a_round(bs, drafts, k, seed=bs), filters, sequential)
    assert bs == 1 or not torch.equal(found, before)


def test_more_requests_than_a_program_adds_at_once(monkeypatch):
    monkeypatch.setattr(learn_kernel, "REQUESTS", 4)
    compared(a_round(11, 1, 3))


def test_rows_that_say_nothing_do_not_stay():
    """NaN in scores or p, no mass anywhere, an impossible draft in the middle of a prefix."""
    given = a_round(12, 4, 5, seeded=torch.arange(12) % 2 == 0)
    given["scores"][:3, 1, 2], given["scores"][3, 2] = NAN, float("-inf")
    given["p"][4:7, 0], given["p"][7:9] = NAN, 0.0
    given["accept_lens"][:] = 5
    drafted = given["choice"][9:, 1:2].unsqueeze(2)
    given["p"][9:, 1:2] = given["p"][9:, 1:2].scatter(2, drafted, 0.0)
    assert compared(given).isfinite().all()
    assert compared(given, True, True).isfinite().all()


def test_greedy_and_broken_requests_teach_nothing():
    given = a_round(6, 3, 8, top_ks=torch.ones(6, dtype=torch.int32))
    before = torch.tensor([[3.0, 2, 1, 2], [1, 4, 3, 2]], dtype=torch.float64, device=DEVICE)
    assert torch.equal(compared(given), before)
    given = a_round(6, 3, 8, tokens=torch.full((6, 4), 400))
    assert torch.equal(compared(given), before)
