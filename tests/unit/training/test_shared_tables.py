"""A head whose tables are trained through the target's matrices: what it starts as and keeps."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.targets.files import TargetFacts, mask_token_of
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.losses import row_losses
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache, Sample
from sglang_hyperdflash.training.shared_tables import folded, share_tables, tables_once
from sglang_hyperdflash.training.trainer import Trainer

V, D, R = 13, 6, 4
SHAPE = DrafterShape(
    layers=1, heads=2, kv_heads=1, head_dim=32, intermediate_size=64, dependency_rank=8
)


def head_of(*, trained: bool, form: str = "residual") -> DependencyHead:
    torch.manual_seed(1)
    head = DependencyHead(V, D, R, form)
    if trained:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
    return head


def matrices(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return tuple(torch.randn(V + 3, D, generator=g).mul(9.0).to(dtype) for _ in range(2))


def everywhere(head: DependencyHead) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    return head.over_vocabulary(torch.arange(V), torch.randn(V, D, generator=g))


def test_a_new_head_adds_nothing_and_begins_where_the_target_has_its_tokens():
    embedding, lm_head = matrices()
    embedding[3] = 0.5 * embedding[7]  # the same direction
    head = head_of(trained=False)
    share_tables(head, embedding, lm_head, seed=0)
    assert not everywhere(head).any()
    table = head.predecessor
    assert table.shape == (V, R) and torch.allclose(table[3], table[7])
    assert 0.01 < table.std().item() < 0.04
    other = head_of(trained=False)
    share_tables(other, embedding, lm_head, seed=0)
    assert torch.equal(table, other.predecessor)  # every process draws the same
    share_tables(third := head_of(trained=False), embedding, lm_head, seed=1)
    assert not torch.allclose(table, third.predecessor)


@pytest.mark.parametrize("form", ["residual", "product"])
def test_a_trained_head_is_what_it_was(form):
    head = head_of(trained=True, form=form)
    before, tensors = everywhere(head), {k: v.clone() for k, v in folded(head).items()}
    share_tables(head, *matrices(), seed=0)
    assert torch.equal(before, everywhere(head))
    assert all(torch.equal(tensors[k], v) for k, v in folded(head).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_never_met_learns_from_one_that_is_like_it(dtype):
    embedding, lm_head = matrices(dtype)
    embedding[3], lm_head[4] = embedding[7], lm_head[8]
    found = {}
    for shared in (True, False):
        head = head_of(trained=False)
        if shared:
            share_tables(head, embedding, lm_head, seed=0)
        optimizer = torch.optim.SGD(head.parameters(), lr=50.0)
        hidden = torch.zeros(1, D)
        for _ in range(4):  # the token behind 7 is 8; 3 and 4 are in no text
            scores = head.over_vocabulary(torch.tensor([7]), hidden)
            optimizer.zero_grad()
            (-scores[0, 8]).backward()
            optimizer.step()
        found[shared] = head.over_vocabulary(torch.tensor([3]), hidden)[0, 4].item()
    assert found[False] == 0.0 and found[True] > 1e-3


def test_chunks_that_are_computed_again_give_the_gradients_of_one_pass():
    lm = torch.nn.Linear(D, V, bias=False).requires_grad_(False)
    torch.manual_seed(4)
    hidden, teacher = torch.randn(2, 10, D)
    labels, previous = torch.randint(0, V, (2, 10))
    gradients = []
    for once in (True, False):
        for chunk in (3, 100):
            head = head_of(trained=True)
            share_tables(head, *matrices(), seed=0)
            with tables_once(head if once else None):
                assert (head.predecessor is head.predecessor) == once
                found = row_losses(
                    hidden.clone().requires_grad_(),
                    labels,
                    lm,
                    early=torch.ones(10, dtype=torch.bool),
                    teacher=teacher,
                    temperature=1.0,
                    chunk=chunk,
                    term="tv",
                    dependency=head,
                    previous=previous,
                )
                (found.ce + found.distance).sum().backward()
            gradients.append([p.grad for p in head.parameters()])
    assert len(gradients[0]) == 5 and all(g.abs().sum() > 0 for g in gradients[0])
    for other in gradients[1:]:
        for mine, theirs in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert head.predecessor is not head.predecessor  # nothing stays behind a pass


@pytest.fixture(scope="module")
def source(target):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (30, 41)]
    return FeatureCache(target, [Sample.continuation(r, 6) for r in rows], dtype=torch.float32)


def trainer_of(target, target_dir, source, folder, *, steps: int, shape=SHAPE) -> Trainer:
    torch.manual_seed(0)
    facts = TargetFacts.from_config(target.config.to_dict())
    config = draft_config(facts, target.hc_head, shape, mask_token_of(str(target_dir)))
    recipe = Recipe(
        steps=steps,
        lr=1e-3,
        lr_floor=1e-3,  # whatever the length: a shorter run stops where a longer one goes on
        batch=2,
        every=3,
        anchors=6,
        warmup_steps=1,
        bf16=False,
        dependency_shared=True,
    )
    return Trainer(Drafter(config).train(), target, source, {"own": source}, recipe, folder)


def test_a_checkpoint_holds_the_sums_and_a_resumed_run_ends_with_the_same(
    target, target_dir, source, tmp_path
):
    saved = {}
    for name, lengths in (("whole", (6,)), ("resumed", (3, 6))):
        for steps in lengths:
            trainer = trainer_of(target, target_dir, source, tmp_path / name, steps=steps)
            trainer.run(tmp_path / f"{name}-out")
        trainer.drafter.save(tmp_path / f"{name}-last")
        saved[name] = (tmp_path / f"{name}-last" / "model.safetensors").read_bytes()
    assert saved["whole"] == saved["resumed"]
    mine = trainer.drafter.dependency
    assert not torch.equal(mine.parametrizations.successor.original, mine.successor)
    served = Drafter.load(tmp_path / "resumed-last")
    for name, tensor in served.dependency.named_parameters():
        expected = folded(mine)[f"dependency.{name}"].to(torch.bfloat16).float()
        assert torch.equal(tensor, expected)
    # The next stage begins from the checkpoint.
    share_tables(served.dependency, target.embed_tokens.weight, target.lm_head.weight, seed=7)
    served.save(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == saved["resumed"]


def test_the_state_holds_none_of_the_targets_matrices(target, target_dir, source, tmp_path):
    trainer = trainer_of(target, target_dir, source, tmp_path / "work", steps=3)
    names = [k for k in trainer.drafter.state_dict() if k.startswith("dependency.")]
    assert sorted(names) == [
        "dependency.gate.weight",
        "dependency.parametrizations.predecessor.0.shared",
        "dependency.parametrizations.predecessor.original",
        "dependency.parametrizations.successor.0.shared",
        "dependency.parametrizations.successor.original",
    ]
    basis = trainer.drafter.dependency.parametrizations.successor[0].basis
    assert basis.data_ptr() == target.lm_head.weight.data_ptr()
    rates = {g.get("factor", 1.0): len(g["params"]) for g in trainer.optimizer.param_groups}
    assert rates[0.3] == 5


def test_a_drafter_without_tables_is_refused(target, target_dir, source, tmp_path):
    plain = DrafterShape(**{**SHAPE.__dict__, "dependency_rank": None})
    with pytest.raises(HyperDFlashConfigError, match=r"dependency_shared .*dependency-rank"):
        trainer_of(target, target_dir, source, tmp_path, steps=3, shape=plain)
