"""The dependency head: its formula, its start, its place in propose, its config and checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.draft.config import load_config, parse_config
from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose, propose_greedy
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from tests.engine.drafters import with_dependency

V, D, R, K = 40, 12, 5, 9


def trained(form: str = "residual") -> DependencyHead:
    """A head of which nothing is zero."""
    torch.manual_seed(1)
    head = DependencyHead(V, D, R, form)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def candidates(head: DependencyHead, rows: int = 6, drafts: int = 4) -> Candidates:
    scores, ids = torch.randn(rows, drafts, V).topk(K)
    return Candidates(ids, scores, head.gates(torch.randn(rows, drafts, D)))


@pytest.mark.parametrize("form", ["residual", "product"])
@torch.no_grad()
def test_scores_are_those_of_the_formula(form):
    head, hidden = trained(form), torch.randn(3, D)
    previous, ids = torch.tensor([7, 0, 39]), torch.randint(0, V, (3, K))
    found = head(previous, head.gates(hidden), ids)
    whole = head.over_vocabulary(previous, hidden)
    torch.testing.assert_close(whole.gather(1, ids), found)
    for row in range(3):
        gates = [float(g @ hidden[row]) + (form == "residual") for g in head.gate.weight]
        for k in range(K):
            a, b = head.predecessor[previous[row]], head.successor[ids[row, k]]
            expected = sum(float(a[i]) * gates[i] * float(b[i]) for i in range(R))
            assert found[row, k].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    # Where the whole vocabulary is scored, in whatever order.
    ids = torch.stack([torch.randperm(V) for _ in range(3)])
    every = head(previous, head.gates(hidden), ids)
    torch.testing.assert_close(every, whole.gather(1, ids))


def test_a_new_head_adds_nothing_and_can_learn():
    for form in ("residual", "product"):
        head = DependencyHead(V, D, R, form)
        scores = head.over_vocabulary(torch.arange(8), torch.randn(8, D))
        assert scores.abs().max() == 0
        scores[:, 3].sum().backward()
        assert head.successor.grad.abs().sum() > 0


@torch.no_grad()
def test_greedy_drafts_follow_the_draft_before_them():
    head = trained()
    found, anchor = candidates(head), torch.arange(6)
    drafts = propose_greedy(found, anchor, head)
    for row in range(6):
        previous = int(anchor[row])
        for k in range(4):
            ids = found.ids[row, k]
            extra = head(torch.tensor([previous]), found.gates[row, k : k + 1], ids.unsqueeze(0))
            previous = int(ids[(found.scores[row, k] + extra[0]).argmax()])
            assert previous == drafts[row, k]
    alone = propose_greedy(found, anchor, None)
    assert torch.equal(alone, found.ids[..., 0])
    assert not torch.equal(alone, drafts)


@torch.no_grad()
def test_greedy_and_sampled_requests_of_a_batch_draft_as_they_would_alone():
    head = trained()
    found, anchor = candidates(head), torch.arange(6)
    top_ks = torch.tensor([1, 1 << 30, 1, 5, 1, 1 << 30])
    ones = torch.ones(6)
    sampling = Sampling(ones, top_ks, ones, torch.zeros(6), need_top_k=True)
    draws = Draws(torch.arange(6) + 100, torch.arange(6) % 2 == 1)
    positions = torch.arange(5).repeat(6, 1) + 30
    mixed = propose(found, head, anchor.unsqueeze(1), positions, sampling, draws, ones[:2])
    greedy = top_ks == 1
    assert torch.equal(mixed.tokens[greedy], propose_greedy(found, anchor, head)[greedy])
    assert torch.equal(mixed.q[greedy].amax(-1), torch.ones(3, 4))
    torch.testing.assert_close(mixed.q.sum(-1), torch.ones(6, 4))
    row = Candidates(found.ids[1:2], found.scores[1:2], found.gates[1:2])
    one = Sampling(ones[:1], top_ks[1:2], ones[:1], torch.zeros(1))
    own = Draws(draws.seeds[1:2], draws.seeded[1:2])
    alone = propose(row, head, anchor[1:2].unsqueeze(1), positions[1:2], one, own, ones[:2])
    assert torch.equal(alone.tokens[0], mixed.tokens[1])
    # Every draft is drawn from its own distribution: the head has seen the draft before it.
    scores = row.scores[0, 1] + head(alone.tokens[:, 0], row.gates[:, 1], row.ids[:, 1])[0]
    torch.testing.assert_close(alone.q[0, 1], scores.softmax(-1))


# --- config and checkpoint -----------------------------------------------------------------------


@pytest.fixture
def folder(drafter_dir, tmp_path):
    """The committed drafter's folder with an added head of rank 8."""
    old = Drafter.load(drafter_dir)
    drafter = Drafter(with_dependency(old.raw, 8, causal=True))
    drafter.load_state_dict(
        {k: v for k, v in old.state_dict().items() if not k.startswith("dependency.")},
        strict=False,
    )
    drafter.save(tmp_path / "draft")
    return tmp_path / "draft"


def test_a_checkpoint_keeps_its_head(folder):
    config = load_config(folder)
    assert (config.dependency.rank, config.dependency.top_k, config.causal) == (8, 64, True)
    head = Drafter.load(folder).dependency
    assert head.predecessor.shape == head.successor.shape == (1363, 8)
    assert 0.015 < head.predecessor.std() < 0.025
    stored = load_file(folder / "model.safetensors")
    assert stored["dependency.gate.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["predecessor", "successor", "gate.weight"])
def test_a_missing_or_misshapen_tensor_of_the_head_is_named(folder, name):
    path = folder / "model.safetensors"
    whole = load_file(path)
    tensor = whole.pop(f"dependency.{name}")
    save_file(whole, path)
    with pytest.raises(HyperDFlashConfigError, match=f"missing: dependency.{name}"):
        Drafter.load(folder)
    save_file(whole | {f"dependency.{name}": tensor[:, :-1].contiguous()}, path)
    with pytest.raises(HyperDFlashConfigError, match=f"dependency.{name} has shape .* asks for"):
        Drafter.load(folder)


def test_a_head_that_the_config_does_not_name_is_refused(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["hyperdflash_config"].pop("dependency")
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HyperDFlashConfigError, match=r"unexpected tensor dependency\.gate\.weight"):
        Drafter.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0, "top_k": 4}, "dependency.rank must be greater than or equal to 1, found 0"),
        ({"rank": 4}, "dependency.top_k is missing"),
        ({"rank": 4, "top_k": 4, "gate": True}, "unknown field gate; known are"),
        ({"rank": 4, "top_k": 9999}, "at most the vocabulary of 1363, found 9999"),
        ({"rank": 4, "top_k": 4, "form": "sum"}, "form must be 'residual' or 'product', found"),
    ],
)
def test_a_wrong_section_says_what_was_expected_and_found(folder, change, message):
    raw = json.loads((folder / "config.json").read_text())
    raw["hyperdflash_config"]["dependency"] = change
    with pytest.raises(HyperDFlashConfigError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    "change",
    [{"layer_types": None}, {"layer_types": ["full_attention"]}, {"layer_types": ["other"] * 3}],
)
def test_a_causal_block_names_every_layer(folder, change):
    """Without layer_types SGLang ignores is_causal: drafts would not be those of training."""
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(HyperDFlashConfigError, match="full_attention once for each of the 3"):
        parse_config(raw | change)


def test_the_server_reads_the_same_config(folder):
    """SGLang hands over what transformers made of config.json, with fields of its own."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(folder)
    assert parse_config(read.to_dict()) == load_config(folder)
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.models.dflash import _get_dflash_layer_attention_params

    assert _get_dflash_layer_attention_params(read, 0) == (-1, AttentionType.DECODER)
    read.is_causal = None
    assert _get_dflash_layer_attention_params(read, 0) == (-1, AttentionType.ENCODER_ONLY)
