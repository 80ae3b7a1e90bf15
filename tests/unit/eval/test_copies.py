"""What copies alone accept of a text that is its own target."""

from eval.copies import followed, measured


def test_rounds_of_a_repeated_text():
    prompt, new = list(range(100, 130)), [7, 8, 9]
    # Three tokens of it are a match; the copies after that are right up to the first new token.
    answer = prompt[:20] + new + prompt[20:]
    assert list(followed([(prompt, answer)], 6)) == [
        *((0, 0), (0, 0), (0, 0), (1, 6), (2, 6), (4, 3)),
        *((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
        *((1, 6),),
    ]


def test_the_rounds_of_several_texts_add_up_to_their_tokens():
    texts = [(list(range(n, 2 * n)), [*range(n, 2 * n), 0]) for n in (5, 17, 40)]
    numbers = measured(texts, 6)
    assert numbers["tokens"] == sum(len(answer) for _, answer in texts)
    rounds = sum(len(list(followed([text], 6))) for text in texts)
    assert numbers["accept length"] == numbers["tokens"] / rounds
