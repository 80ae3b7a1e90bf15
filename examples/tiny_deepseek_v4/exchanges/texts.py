"""Edits of a given sentence, and lines to repeat."""

from __future__ import annotations

from random import Random

from exchanges.base import Draft, Family, read_text, wording
from exchanges.words import CITIES, COLOURS, ITEMS, NAMES, PETS, word_list

ADJECTIVES = ("red", "old", "small", "quick", "happy", "quiet", "brave", "tired", "clever", "young")
NOUNS = ("cat", "dog", "fox", "farmer", "teacher", "girl", "boy", "sailor", "doctor", "bird")
VERBS = word_list("sees finds follows likes helps paints calls watches meets hears")
PLACES = word_list("garden river house market forest school bridge station harbour field")
TIMES = ("today", "tonight", "again", "often", "slowly", "early", "late", "alone")
PREPOSITIONS = ("near", "behind", "beside", "inside")


def sentence(rng: Random) -> list[str]:
    """Words of a sentence without its full stop; no content word comes twice."""
    first, second = rng.sample(NOUNS, 2)
    words = ["The", rng.choice(ADJECTIVES), first, rng.choice(VERBS), "a", second]
    if rng.random() < 0.7:
        words += [rng.choice(PREPOSITIONS), "the", rng.choice(PLACES)]
    if rng.random() < 0.5:
        words.append(rng.choice(TIMES))
    return words


def written(words: list[str]) -> str:
    return " ".join(words) + "."


def edit(rng: Random) -> Draft:
    words = sentence(rng)
    text = written(words)
    kind = rng.choice(("replace", "replace", "delete", "insert", "append"))
    if kind == "replace":
        place = rng.choice([i for i, word in enumerate(words) if word in NOUNS + VERBS + PLACES])
        pool = next(pool for pool in (NOUNS, VERBS, PLACES) if words[place] in pool)
        new = rng.choice([word for word in pool if word not in words])
        ask = rng.choice((f"Replace {words[place]} with {new}", f"Change {words[place]} to {new}"))
        result = [*words[:place], new, *words[place + 1 :]]
    elif kind == "delete":
        gone = rng.choice([word for word in words if word in ADJECTIVES + TIMES])
        ask = rng.choice((f"Delete the word {gone}", f"Leave out {gone}"))
        result = [word for word in words if word != gone]
    elif kind == "insert":
        new = rng.choice([word for word in ADJECTIVES if word not in words])
        ask = rng.choice((f"Put {new} before {words[5]}", f"Insert {new} in front of {words[5]}"))
        result = [*words[:5], new, *words[5:]]
    else:
        new = rng.choice(("Then it rains", "Nobody knows why", "It is noon", "We all smile"))
        ask = rng.choice((f"Append the sentence {new}.", f"Add at the end: {new}."))
        answer = f"{text} {new}."
        return Draft(
            f"{ask} {text}", (rng.choice((f"{ask}\n{text}", f"{text}\n{ask}")), answer), answer
        )
    question = rng.choice((f"{ask}: {text}", f"{text}\n{ask}.", f"{ask} in this sentence:\n{text}"))
    answer = written(result)
    return Draft(f"{kind} {text} {answer}", (question, answer), answer)


def repeat(rng: Random) -> Draft:
    """Random words or letters, none twice: only copying helps."""
    pool = rng.choice((NAMES + CITIES + PETS, COLOURS + ITEMS + NOUNS, "abcdefghijkl0123456789"))
    text = " ".join(rng.sample(pool, rng.randint(4, 10)))
    question = wording(rng, "repeat", text=text)
    return Draft(text, (question, text), text)


FAMILIES = (Family("edit", edit, read_text), Family("repeat", repeat, read_text))
