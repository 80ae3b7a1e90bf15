"""The words that the families draw from: few and common, so that a tiny model learns them."""


def word_list(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


NAMES = word_list("Ann Ben Carl Dora Emma Finn Gina Hugo Ivan Jane Kim Leo Mia Nora Omar Paul")
ITEMS = word_list("apples pears plums books pens cards coins shells stamps eggs nuts cups")
THINGS = word_list("apple pear plum book pen card coin shell stamp egg nut cup")
COLOURS = word_list("red blue green black white yellow")
CITIES = word_list("Oslo Rome Paris Cairo Lima Delhi Kyoto Berlin Madrid Dublin")
PETS = word_list("cat dog fox owl hen pony goat duck")
MONTHS = word_list(
    "January February March April May June July August September October November December"
)
DAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
DRINKS = word_list("tea coffee juice milk cake soup bread pie")
