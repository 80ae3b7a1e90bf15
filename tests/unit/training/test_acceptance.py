"""Acceptance as the loss, heads in training, causal blocks and widths: values and gradients."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sglang_hyperdflash.draft.algorithm import propose_block
from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.targets.files import TargetFacts, load_tokenizer
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.anchors import block_mask
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.losses import row_losses
from sglang_hyperdflash.training.objective import Blocks, Objective, denominators, sums
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample, collate
from sglang_hyperdflash.training.trainer import Trainer

V, D, R, N = 13, 6, 4, 10
SHAPE = DrafterShape(
    layers=1, heads=2, kv_heads=1, head_dim=32, intermediate_size=64, dependency_rank=R
)


def rows(form: str = "residual"):
    """Draft states, labels and a head of which nothing is zero."""
    torch.manual_seed(3)
    head = torch.nn.Linear(D, V, bias=False).requires_grad_(False)
    dependency = DependencyHead(V, D, R, form)
    with torch.no_grad():
        for parameter in dependency.parameters():
            parameter.normal_()
    hidden = torch.randn(N, D, requires_grad=True)
    labels, previous = torch.randint(0, V, (2, N))
    return head, dependency, hidden, labels, previous, torch.randn(N, D)


def losses(term: str, chunk: int, **more):
    head, dependency, hidden, labels, previous, teacher = rows(more.pop("form", "residual"))
    every = torch.ones(N, dtype=torch.bool)
    found = row_losses(
        hidden,
        labels,
        head,
        early=every if term != "selector" else ~every,
        teacher=teacher if term != "selector" else teacher[:0],
        temperature=1.0,
        chunk=chunk,
        term=term,
        dependency=dependency,
        previous=previous,
        own=True,
        **more,
    )
    return found, rows(), dependency, hidden


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("term", ["tv", "kl"])
def test_distances_are_those_of_the_sums_over_the_vocabulary(term, chunk):
    found, (head, dependency, hidden, labels, previous, teacher), *_ = losses(term, chunk)
    ce, distance, hits, own = found
    with torch.no_grad():
        scores = head(hidden) + dependency.over_vocabulary(previous, hidden)
        for i in range(N):
            q = scores[i].softmax(-1).tolist()
            p = head(teacher[i]).softmax(-1).tolist()
            expected = {
                "tv": sum(abs(a - b) for a, b in zip(p, q, strict=True)),
                "kl": sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
            }
            assert distance[i].item() == pytest.approx(expected[term], rel=1e-4, abs=1e-5)
            assert ce[i].item() == pytest.approx(-math.log(q[labels[i]]), rel=1e-4)
            alone = F.cross_entropy(head(hidden[i]), labels[i]).item()
            assert own[i].item() == pytest.approx(alone, rel=1e-4)
            assert bool(hits[i]) == (q[labels[i]] == max(q))


def test_the_gradient_of_tv_is_the_closed_form():
    """d||p - q||_1 / ds = q * (sign(q - p) - <sign(q - p), q>)."""
    (_, distance, *_), _, dependency, hidden = losses("tv", 3)
    distance.sum().backward()
    head, fresh, again, _, previous, teacher = rows()
    scores = head(again) + fresh.over_vocabulary(previous, again)
    with torch.no_grad():
        q, p = scores.softmax(-1), head(teacher).softmax(-1)
        sign = (q - p).sign()
        gradient = q * (sign - (sign * q).sum(-1, keepdim=True))
    scores.backward(gradient)
    torch.testing.assert_close(hidden.grad, again.grad, rtol=1e-4, atol=1e-6)
    for a, b in zip(dependency.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
        assert a.grad.abs().sum() > 0


def test_the_selector_chooses_among_its_candidates():
    (ce, distance, hits, _), _, *_ = losses("selector", 4, top_k=3, form="product")
    head, dependency, hidden, labels, previous, _ = rows("product")
    assert distance.shape == (0,)
    inside = 0
    with torch.no_grad():
        own = head(hidden)
        scores = own + dependency.over_vocabulary(previous, hidden)
        for i in range(N):
            ids = own[i].topk(3).indices
            expected = F.cross_entropy(own[i], labels[i]).item()
            if labels[i] in ids:
                inside += 1
                at = ids.tolist().index(labels[i])
                expected += F.cross_entropy(scores[i][ids], torch.tensor(at)).item()
            assert ce[i].item() == pytest.approx(expected, rel=1e-4)
            assert bool(hits[i]) == bool(ids[scores[i][ids].argmax()] == labels[i])
    assert 0 < inside < N


def test_no_more_than_a_chunk_of_logits_is_alive_with_a_head():
    head, dependency, hidden, labels, previous, teacher = rows()
    sizes = []

    def recording(states):
        sizes.append(len(states))
        return head(states)

    ce, tv, *_ = row_losses(
        hidden,
        labels,
        recording,
        early=torch.ones(N, dtype=torch.bool),
        teacher=teacher,
        temperature=1.0,
        chunk=4,
        term="tv",
        dependency=dependency,
        previous=previous,
    )
    forward = len(sizes)
    (ce.sum() + tv.sum()).backward()
    assert max(sizes) == 4 and len(sizes) > forward


# --- the block -----------------------------------------------------------------------------------


def test_a_causal_row_sees_no_later_row():
    anchors, keep = torch.tensor([[2, 5]]), torch.tensor([[True, True]])
    block, context = 4, 6
    own = block_mask(anchors, keep, context, block, causal=True)[0, :, context:]
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[:4, :4] = expected[4:, 4:] = torch.ones(4, 4).tril().bool()
    assert torch.equal(own, expected)


def drafter_of(target, target_dir: Path, shape: DrafterShape = SHAPE, seed: int = 0) -> Drafter:
    """A small drafter with a random head, its blocks different from each other."""
    torch.manual_seed(seed)
    facts = TargetFacts.from_config(target.config.to_dict())
    drafter = Drafter(
        draft_config(facts, target.hc_head, shape, load_tokenizer(str(target_dir)).mask_token_id)
    )
    drafter.inherit(target.hc_head)
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            if value.dim() == 2 and "reducer" not in name:
                value.normal_(std=2 * value.shape[-1] ** -0.5)
    return drafter.eval()


@pytest.fixture(scope="module")
def source(target) -> FeatureCache:
    torch.manual_seed(1)
    samples = [
        Sample.continuation(torch.randint(5, 1300, (24,)).tolist(), start) for start in (6, 9)
    ]
    return FeatureCache(target, samples, dtype=torch.float32)


@torch.no_grad()
def test_the_first_drafts_of_a_causal_block_are_the_same_at_every_width(target, target_dir, source):
    rows, states = collate(source.samples), source.states([0, 1])
    blocks = Blocks.draw(rows, 5, 7, [0, 1])
    for causal in (True, False):
        shape = DrafterShape(**{**SHAPE.__dict__, "causal": causal})
        whole = drafter_of(target, target_dir, shape)
        found = {7: Replay(whole, target)}
        for width in (2, 4):
            narrow = DrafterShape(**{**shape.__dict__, "block_size": width})
            found[width] = Replay(drafter_of(target, target_dir, narrow), target)
            found[width].drafter.load_state_dict(whole.state_dict())
        drafts = {
            width: replay.draft_states(rows, states, blocks.anchors, blocks.keep)
            for width, replay in found.items()
        }
        for width in (2, 4):
            gap = (drafts[width] - drafts[7][:, :, : width - 1]).abs().max()
            assert (gap < 1e-5) == causal, (width, gap)


def test_the_ce_of_u_keeps_the_right_token_among_the_candidates(
    target, target_dir, source, tmp_path
):
    """Found as: a head that was trained from the start carried the drafts by itself."""
    shape = DrafterShape(**{**SHAPE.__dict__, "dependency_rank": 64})
    rows, found, mask = collate(source.samples), {}, load_tokenizer(str(target_dir)).mask_token_id
    facts = TargetFacts.from_config(target.config.to_dict())
    blocks, states = Blocks.draw(rows, 20, 7, [0, 1]), source.states([0, 1])
    for weight in (0.0, 0.3):
        torch.manual_seed(0)
        drafter = Drafter(draft_config(facts, target.hc_head, shape, mask))
        objective = Objective(candidates=weight)
        recipe = Recipe(
            steps=130, batch=2, anchors=20, every=130, dependency_lr=3.0, objective=objective
        )
        trainer = Trainer(drafter, target, source, {}, recipe, tmp_path / str(weight))
        trainer.run(tmp_path / f"out-{weight}")
        with torch.no_grad():
            hidden = trainer.replay.draft_states(rows, states, blocks.anchors, blocks.keep)
            labels = blocks.labels[blocks.supervised].unsqueeze(-1)
            likeliest = target.lm_head(hidden[blocks.supervised]).topk(8).indices
        found[weight] = (likeliest == labels).any(-1).float().mean().item()
    assert found[0.3] > 0.9 and found[0.0] < 0.5


def test_the_trainers_drafts_are_those_of_the_page(target, target_dir, source):
    for causal in (False, True):
        shape = DrafterShape(**{**SHAPE.__dict__, "causal": causal})
        drafter = drafter_of(target, target_dir, shape)
        replay, rows = Replay(drafter, target), collate(source.samples)
        anchors = torch.tensor([[7, 12], [10, 15]])
        keep = torch.tensor([[True, True], [True, False]])
        drafts = replay.draft(rows, source.states([0, 1]), anchors, keep)
        assert (drafts[1, 1] == 0).all()
        for row, at in ((0, 0), (0, 1), (1, 0)):
            tokens = source.samples[row].tokens[: int(anchors[row, at]) + 1]
            assert drafts[row, at].tolist() == propose_block(target, drafter, tokens)


@torch.no_grad()
def test_the_expected_tau_is_the_sum_of_products_of_overlaps(target, target_dir, source):
    """Against a loop over one block at a time, q on the candidates alone."""
    shape = DrafterShape(**{**SHAPE.__dict__, "dependency_top_k": 50})
    drafter = drafter_of(target, target_dir, shape)
    replay, total, count = Replay(drafter, target), 0.0, 0
    for i, sample in enumerate(source.samples):
        states, tokens = source.states([i]), sample.tokens
        for anchor in range(sample.spans[0][0], len(tokens) - 6):
            hidden = replay.draft_states(
                collate([sample]), states, torch.tensor([[anchor]]), torch.tensor([[True]])
            )[0, 0]
            reach, tau = 1.0, 1.0
            for k in range(6):
                own = target.lm_head(hidden[k])
                ids = own.topk(50).indices
                before = torch.tensor([tokens[anchor + k]])
                extra = drafter.dependency.over_vocabulary(before, hidden[k : k + 1])[0]
                q = (own + extra)[ids].softmax(-1)
                p = target.lm_head(target.final(states.residual[0, anchor + k])).softmax(-1)[ids]
                reach *= float(torch.minimum(p, q).sum())
                tau += reach
            total, count = total + tau, count + 1
    assert replay.expected_tau(source) == pytest.approx(total / count, rel=1e-4)


# --- objective and trainer -----------------------------------------------------------------------


def test_a_head_is_trained_on_acceptance_and_the_papers_drafter_on_the_papers_loss(target_dir):
    target = LocalTarget(target_dir)
    with_head = drafter_of(target, target_dir).config
    without = drafter_of(
        target, target_dir, DrafterShape(**{**SHAPE.__dict__, "dependency_rank": None})
    ).config
    assert Objective().resolved(with_head).factors == pytest.approx((0.1, 0.9, 0.3))
    assert Objective().resolved(without).factors[:2] == (1.0, 0.15)
    assert Objective(loss="ce_kl").resolved(with_head).term == "kl"
    for wrong, message in ((Objective(loss="selector"), "needs a drafter with a dependency head"),):
        with pytest.raises(HyperDFlashConfigError, match=message):
            wrong.resolved(without)


def test_the_sums_are_the_weighted_rows(target, target_dir, source):
    drafter = drafter_of(target, target_dir)
    objective = Objective().resolved(drafter.config)
    rows, states = collate(source.samples), source.states([0, 1])
    blocks = Blocks.draw(rows, 4, 7, [0, 1])
    hidden = Replay(drafter, target).draft_states(rows, states, blocks.anchors, blocks.keep)
    terms, *_ = sums(objective, target, rows, states, blocks, hidden, drafter)
    tv = ce = alone = weight = 0.0
    with torch.no_grad():
        for row, block in blocks.keep.nonzero().tolist():
            anchor, costs = int(blocks.anchors[row, block]), []
            for k in range(int(blocks.supervised[row, block].sum())):
                h, tokens = hidden[row, block, k], source.samples[row].tokens
                before = torch.tensor([tokens[anchor + k]])
                extra = drafter.dependency.over_vocabulary(before, h.unsqueeze(0))[0]
                q = (target.lm_head(h) + extra).softmax(-1)
                p = target.lm_head(target.final(states.residual[row, anchor + k])).softmax(-1)
                label = tokens[anchor + k + 1]
                u = target.lm_head(h).log_softmax(-1)
                costs.append((float((p - q).abs().sum()), -math.log(q[label]), -float(u[label])))
            for k, (distance, whole, own) in enumerate(costs):
                w = math.exp(-k / 4)
                tv, ce, alone = tv + w * distance, ce + w * whole, alone + w * own
                weight += w
    assert terms.tolist() == pytest.approx([ce, tv, alone], rel=1e-4)
    assert denominators(objective, blocks).tolist() == pytest.approx([weight] * 3, rel=1e-5)


def test_training_starts_at_the_drafter_without_a_head(target, target_dir, source):
    """A new head changes no draft, and the trainer's first step moves B, then A and G."""
    torch.manual_seed(0)
    facts = TargetFacts.from_config(target.config.to_dict())
    raw = draft_config(facts, target.hc_head, SHAPE, load_tokenizer(str(target_dir)).mask_token_id)
    drafter, plain = Drafter(raw), DrafterShape(**{**SHAPE.__dict__, "dependency_rank": None})
    torch.manual_seed(0)
    bare = Drafter(
        draft_config(facts, target.hc_head, plain, load_tokenizer(str(target_dir)).mask_token_id)
    )
    tokens = source.samples[0].tokens[:12]
    assert propose_block(target, drafter, tokens) == propose_block(target, bare, tokens)


def trainer_of(target, target_dir, source, folder: Path, **recipe) -> Trainer:
    objective = recipe.pop("objective", Objective())
    steps = Recipe(
        steps=3, batch=2, every=3, anchors=6, warmup_steps=1, objective=objective, **recipe
    )
    drafter = drafter_of(target, target_dir)
    return Trainer(drafter.train(), target, source, {"own": source}, steps, folder)


def test_the_head_learns_slower_than_the_rest(target, target_dir, source, tmp_path):
    trainer = trainer_of(target, target_dir, source, tmp_path / "work", lr=1e-3, lr_floor=0.0)
    before = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    report = trainer.step()
    assert {"loss", "ce", "tv", "own"} <= set(report)
    weighted = 0.1 * report["ce"] + 0.9 * report["tv"] + 0.3 * report["own"]
    assert report["loss"] == pytest.approx(weighted, rel=1e-5)
    # AdamW's first step is the learning rate wherever there is a gradient.
    moved = {n: (p - before[n]).abs().max() for n, p in trainer.drafter.named_parameters()}
    torch.testing.assert_close(moved["dependency.successor"], torch.tensor(3e-4), rtol=0.02, atol=0)
    torch.testing.assert_close(
        moved["layers.0.mlp.up_proj.weight"], torch.tensor(1e-3), rtol=0.02, atol=0
    )


def test_a_gate_that_is_switched_off_stays_as_it_is(target, target_dir, source, tmp_path):
    trainer = trainer_of(target, target_dir, source, tmp_path / "work", dependency_gate=False)
    before = trainer.drafter.dependency.gate.weight.clone()
    trainer.run(tmp_path / "out")
    assert torch.equal(before, trainer.drafter.dependency.gate.weight)
    assert trainer.drafter.dependency.successor.grad.abs().sum() > 0


@pytest.mark.parametrize("loss", ["acceptance", "selector", "ce_kl"])
def test_every_loss_trains_and_the_best_is_chosen_by_what_is_served(
    target, target_dir, source, tmp_path, loss
):
    trainer = trainer_of(
        target, target_dir, source, tmp_path / "work", objective=Objective(loss=loss)
    )
    trainer.run(tmp_path / "out")
    (record,) = trainer.records
    assert record["score"] == pytest.approx((record["tau"] + record["tau_sampled"]) / 2)
    assert trainer.best["score"] == record["score"]
    assert Drafter.load(tmp_path / "out").dependency is not None
