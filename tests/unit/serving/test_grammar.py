"""A matcher that fails at any row of a block ends its own request, and masks no other's rows."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hyperdflash.serving.verification.grammar import block_mask, pass_by_failed

WIDTH = 7


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request, target_dir):
    tokenizer = get_tokenizer(str(target_dir))
    size, eos = len(tokenizer), [tokenizer.eos_token_id]
    if request.param == "xgrammar":
        return tokenizer, XGrammarGrammarBackend(tokenizer, size, eos)
    return tokenizer, GuidanceBackend(tokenizer, n_vocab=size, eos_token_ids=eos)


def batch_of(backend, *regexes: str):
    """Requests and their blocks: an anchor and six digits each."""
    tokenizer, made = backend
    grammars = [made.dispatch_regex(one).copy() for one in regexes]
    reqs = [SimpleNamespace(rid=str(i), grammar=g, to_finish=None) for i, g in enumerate(grammars)]
    digit = tokenizer.encode("7", add_special_tokens=False)[0]
    tokens = torch.full((len(reqs), WIDTH), digit)
    for grammar in grammars:
        grammar.accept_token(digit)
    info = SimpleNamespace(vocab_size=len(tokenizer), grammar_mask=object())
    return SimpleNamespace(reqs=reqs, sampling_info=info), tokens


def masks(batch, tokens) -> torch.Tensor:
    mask = block_mask(batch, GrammarTree.from_linear_chain(tokens), "cpu", None)
    assert batch.sampling_info.grammar_mask is None
    return mask.vocab_mask.view(*tokens.shape, -1)


def fail(grammar, method: str, call: int) -> None:
    """Let one call fail, and leave the matcher as it was before it."""
    original, calls = getattr(grammar, method), itertools.count(1)

    def failing(*args):
        if next(calls) == call:
            raise RuntimeError("planted")
        return original(*args)

    setattr(grammar, method, failing)


@pytest.mark.parametrize("method", ["fill_vocab_mask", "accept_token", "rollback"])
@pytest.mark.parametrize("call", [1, 3, WIDTH - 1])
def test_a_failing_matcher_ends_its_request_only(backend, method, call):
    expected = masks(*batch_of(backend, "[0-9]+", "[0-9]+"))
    assert not (expected == -1).all(-1).any()
    batch, tokens = batch_of(backend, "[0-9]+", "[0-9]+", "[0-9]+")
    fail(batch.reqs[1].grammar, method, call)
    found = masks(batch, tokens)
    assert [req.to_finish is not None for req in batch.reqs] == [False, True, False]
    assert torch.equal(found[[0, 2]], expected) and (found[1] == -1).all()


def test_a_matcher_that_has_failed_already_is_passed_by(backend):
    """SGLang has ended its request, for a reason of its own.

    A reasoning parser wraps every grammar; SGLang then asks each one of a mixed batch for its mask.
    """
    batch, tokens = batch_of(backend, "7(yes|no)", "[0-9]+")
    failed, healthy = batch.reqs
    with pytest.raises(ValueError):
        failed.grammar.accept_token(int(tokens[0, 0]))
    reason = failed.to_finish = object()
    masks(batch, tokens)
    assert failed.to_finish is reason and healthy.to_finish is None
    for req in batch.reqs:
        req.grammar = ReasonerGrammarObject(req.grammar, think_end_ids=[1, 2])
        req.grammar.maybe_init_reasoning(False)
    pass_by_failed(batch.reqs)
    grammars, size = [failed.grammar, healthy.grammar], batch.sampling_info.vocab_size
    info = SimpleNamespace(grammars=grammars, temperatures=[1, 1], device="cpu", vocab_size=size)
    SamplingBatchInfo.update_regex_vocab_mask(info)
    assert [bool((row == -1).all()) for row in info.grammar_mask.vocab_mask] == [True, False]
