"""The tiny target's trainer: packed rows, fast forms of the modules, and Muon."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import EXAMPLE


@pytest.fixture
def modules(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import exchanges
    import muon
    import pretrain
    import pretrain_data
    import pretrain_model

    return SimpleNamespace(
        exchanges=exchanges, muon=muon, run=pretrain, data=pretrain_data, model=pretrain_model
    )


@pytest.fixture
def tokenizer(target_dir):
    return AutoTokenizer.from_pretrained(target_dir)


def test_an_exchange_is_encoded_as_the_chat_template_writes_it(modules, tokenizer):
    for exchange in modules.exchanges.generate(0, 2):
        ids, learned = modules.data.encode(tokenizer, exchange)
        text = tokenizer.apply_chat_template(list(exchange.messages), tokenize=False)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        says = "".join(
            message["content"] + tokenizer.eos_token
            for message in exchange.messages
            if message["role"] == "assistant"
        )
        assert tokenizer.decode([i for i, own in zip(ids, learned, strict=True) if own]) == says


def test_a_batch_holds_whole_exchanges_and_hides_them_from_each_other(modules, tokenizer):
    drawn = list(modules.exchanges.generate(0, 1))
    batch = modules.data.pack(tokenizer, drawn, rows=32)
    found = []
    for row in range(32):
        for number in range(int(batch.documents[row].max()) + 1):
            found.append(batch.tokens[row][batch.documents[row] == number].tolist())
    assert sorted(found) == sorted(modules.data.encode(tokenizer, e)[0] for e in drawn)
    assert not batch.learned[batch.documents < 0].any()
    mask = batch.mask[0, 0] == 0
    documents = batch.documents[0, :-1]
    for query in range(0, modules.data.SEQUENCE, 7):
        for key in range(0, modules.data.SEQUENCE, 5):
            seen = key <= query and documents[key] == documents[query]
            assert bool(mask[query, key]) == bool(seen)


def test_a_step_has_the_same_batch_always_and_another_one_the_next_step(modules, tokenizer):
    first = modules.data.training_batch(tokenizer, 0, 5, 4)
    assert torch.equal(first.tokens, modules.data.training_batch(tokenizer, 0, 5, 4).tokens)
    assert not torch.equal(first.tokens, modules.data.training_batch(tokenizer, 0, 6, 4).tokens)


def test_held_out_batches_hold_every_exchange(modules, tokenizer):
    batches = modules.data.held_out_batches(tokenizer, 1000, 3, 16)
    found = sum(int((b.documents.max(1).values + 1).sum()) for b in batches)
    assert found == 3 * len(modules.exchanges.FAMILIES)
    assert len(batches) < found / 8  # rows are shared


def test_the_fast_forms_compute_what_transformers_computes(modules, tokenizer):
    config = modules.model.make_config(tokenizer, 2, 32)
    fast = modules.model.make_model(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in fast.parameters():  # sinks and mixing weights start at zero
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    plain = type(fast)(copy.deepcopy(config))
    plain.load_state_dict(fast.state_dict())
    plain.config._attn_implementation = "eager"
    ids = torch.randint(5, len(tokenizer), (2, 24), generator=generator)
    causal = torch.full((24, 24), -1e9).triu(1).expand(2, 1, 24, 24)
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
        found = fast(
            input_ids=ids, attention_mask={"sliding_attention": causal}, use_cache=False
        ).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_muons_steps_have_singular_values_near_one_whatever_the_gradients(modules):
    torch.manual_seed(0)
    for shape in ((3, 32, 64), (2, 4, 64, 32), (1, 48, 48)):
        values = torch.linalg.svdvals(modules.muon.orthogonal(100 * torch.randn(shape)))
        assert 0.3 < values.min() < values.max() < 1.4


def test_muon_moves_every_matrix_of_a_stack_by_its_rate(modules):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(2, 32, 64)) for _ in range(2)]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = modules.muon.Muon(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for old, new in zip(before, parameters, strict=True):
        values = torch.linalg.svdvals((new - old).detach())
        assert values.shape == (2, 32)
        assert 0.03 < values.min() < values.max() < 0.14


def test_a_fresh_models_paths_keep_to_themselves_and_its_tokens_are_loud(modules, tokenizer):
    model = modules.model.make_model(modules.model.make_config(tokenizer, 2, 32)).model
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.5, rel=0.02)
    with torch.no_grad():
        _, mixed, _ = model.layers[0].attn_hc(torch.zeros(1, 1, 4, 256))
    assert torch.all(mixed.diagonal(dim1=-2, dim2=-1) > 0.8)
    reads = [c.base[:4].argmax().item() for x in model.layers for c in (x.attn_hc, x.ffn_hc)]
    assert reads == [0, 1, 2, 3]


def test_a_step_follows_the_mean_over_both_batches_tokens(
    modules, target_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(modules.run, "HELD_OUT_PER_FAMILY", 1)
    monkeypatch.setattr(modules.run, "ROWS", 2)
    run = modules.run.Run(SimpleNamespace(out=target_dir, work=tmp_path, layers=2, expert_width=32))
    parameters = list(run.model.parameters())
    batches = [modules.data.training_batch(run.tokenizer, 0, part, 2) for part in (0, 1)]
    batches[1].learned[1] = False  # a batch of half as many tokens
    monkeypatch.setattr(modules.run, "training_batch", lambda *args: batches[args[2]])
    losses = torch.cat([modules.model.token_losses(run.model, batch) for batch in batches])
    losses.mean().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    expected = [None if p.grad is None else p.grad.clone() for p in parameters]
    run.model.zero_grad()
    found = []
    recorder = SimpleNamespace(
        step=lambda: found.extend(p.grad for p in parameters), zero_grad=lambda: None
    )
    run.optimizers = [recorder]
    assert run.step(1.0) == pytest.approx(losses.mean().item(), rel=1e-5)
    assert run.state["step"] == 1
    assert max(g.abs().max() for g in expected if g is not None) > 1e-3
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
    difference = torch.cat([(a - b).flatten() for a, b in pairs]).norm()
    # bf16 products leave 0.1 % here; the mean of the batches' means is 5.6 % off.
    assert difference < 0.01 * torch.cat([b.flatten() for _, b in pairs]).norm()


def test_a_run_resumes_where_its_state_was_written(modules, target_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(modules.run, "HELD_OUT_PER_FAMILY", 1)
    monkeypatch.setattr(modules.run, "ROWS", 2)
    args = SimpleNamespace(out=target_dir, work=tmp_path, layers=2, expert_width=32)
    whole, part = modules.run.Run(args), modules.run.Run(args)
    expected = [whole.step(1.0) for _ in range(3)]
    assert [part.step(1.0) for _ in range(2)] == expected[:2]
    part.save()
    resumed = modules.run.Run(args)
    assert resumed.step(1.0) == expected[2] and resumed.state["step"] == 3
