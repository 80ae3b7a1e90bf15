"""Scrambled prompts: always the same, no exchange's, a fit prompt's length, double the weight."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import EXAMPLE


@pytest.fixture(scope="module")
def corpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        import corpus

        yield corpus


@pytest.fixture(scope="module")
def split(corpus):
    return corpus.load()


def turns_of(conversations) -> list[str]:
    return [m["content"] for messages in conversations for m in messages if m["role"] == "user"]


def test_a_seed_gives_the_same_prompts_and_other_seeds_give_others(corpus):
    exchanges = corpus.conversations(("addition", "edit", "order"), 1, 20)
    first, again, other = (corpus.scrambled(exchanges, seed, 50) for seed in (1, 1, 2))
    assert first == again
    assert len(first) == 50
    assert not {*turns_of(first)} & {*turns_of(other)}
    assert all(len(messages) == 1 and messages[0]["content"].strip() for messages in first)


def test_they_are_not_the_exchanges_they_are_made_of(corpus, split):
    """A tenth of the words or more is another's place, so hardly one reads as it did."""
    for part in ("train", "held_out"):
        asked = {turn for kind in corpus.FAMILIES for turn in turns_of(split[kind][part])}
        made = turns_of(split[corpus.SCRAMBLED][part])
        assert sum(turn in asked for turn in made) < 0.05 * len(made)
    train, held_out = ({*turns_of(split[corpus.SCRAMBLED][p])} for p in ("train", "held_out"))
    assert len(held_out - train) > 0.95 * len(held_out)


def test_most_of_them_hold_words_that_no_exchange_has(corpus, split):
    known = Counter(
        word
        for kind in corpus.FAMILIES
        for turn in turns_of(split[kind]["train"])
        for word in turn.split()
    )
    made = turns_of(split[corpus.SCRAMBLED]["train"])
    assert sum(any(word not in known for word in turn.split()) for turn in made) > len(made) / 2


def test_enough_of_them_are_as_short_as_a_prompt_must_be(corpus, split):
    from transformers import AutoTokenizer

    import own_answers

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "target")
    made = split[corpus.SCRAMBLED]
    assert (
        len(own_answers.prompts_of(tokenizer, made["train"])) >= 5000 * corpus.WEIGHTS["scrambled"]
    )
    assert len(own_answers.prompts_of(tokenizer, made["held_out"])) >= 120
