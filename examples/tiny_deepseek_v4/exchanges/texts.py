"""Edits of a given sentence, and lines to repeat."""

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
    """Draw the words of a sentence without its full stop; no content word comes twice."""
    first, second = rng.sample(NOUNS, 2)
    words = ["The", rng.choice(ADJECTIVES), first, rng.choice(VERBS), "a", second]
    if rng.random() < 0.7:
        words += [rng.choice(PREPOSITIONS), "the", rng.choice(PLACES)]
    if rng.random() < 0.5:
        words.append(rng.choice(TIMES))
    return words


def edit(rng: Random) -> Draft:
    words = sentence(rng)
    text = " ".join(words) + "."
    kind = rng.choice(("replace", "replace", "delete", "insert", "append"))
    if kind == "replace":
        old = rng.choice([word for word in words if word in NOUNS + VERBS + PLACES])
        pool = next(pool for pool in (NOUNS, VERBS, PLACES) if old in pool)
        new = rng.choice([word for word in pool if word not in words])
        request = rng.choice((f"Replace {old} with {new}", f"Change {old} to {new}"))
        words = [new if word == old else word for word in words]
    elif kind == "delete":
        old = rng.choice([word for word in words if word in ADJECTIVES + TIMES])
        request = rng.choice((f"Delete the word {old}", f"Leave out {old}"))
        words.remove(old)
    elif kind == "insert":
        new, noun = rng.choice([word for word in ADJECTIVES if word not in words]), words[5]
        request = rng.choice((f"Put {new} before {noun}", f"Insert {new} in front of {noun}"))
        words.insert(5, new)
    else:
        new = rng.choice(("Then it rains", "Nobody knows why", "It is noon", "We all smile"))
        request = rng.choice((f"Append the sentence {new}.", f"Add at the end: {new}."))
        question = rng.choice((f"{request}\n{text}", f"{text}\n{request}"))
        answer = f"{text} {new}."
        return Draft(f"{request} {text}", (question, answer), answer)
    forms = (f"{request}: {text}", f"{text}\n{request}.", f"{request} in this sentence:\n{text}")
    question, answer = rng.choice(forms), " ".join(words) + "."
    return Draft(f"{kind} {text} {answer}", (question, answer), answer)


def repeat(rng: Random) -> Draft:
    """Ask to repeat random words or letters, none twice, which only copying can do."""
    pool = rng.choice((NAMES + CITIES + PETS, COLOURS + ITEMS + NOUNS, "abcdefghijkl0123456789"))
    text = " ".join(rng.sample(pool, rng.randint(4, 10)))
    return Draft(text, (wording(rng, "repeat", text=text), text), text)


FAMILIES = (Family("edit", edit, read_text), Family("repeat", repeat, read_text))
