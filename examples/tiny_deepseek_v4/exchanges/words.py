"""The words that the families draw from: few and common, so that a tiny model learns them."""

from __future__ import annotations

NAMES = tuple("Ann Ben Carl Dora Emma Finn Gina Hugo Ivan Jane Kim Leo Mia Nora Omar Paul".split())
ITEMS = tuple("apples pears plums books pens cards coins shells stamps eggs nuts cups".split())
THINGS = tuple("apple pear plum book pen card coin shell stamp egg nut cup".split())
COLOURS = tuple("red blue green black white yellow".split())
CITIES = tuple("Oslo Rome Paris Cairo Lima Delhi Kyoto Berlin Madrid Dublin".split())
PETS = tuple("cat dog fox owl hen pony goat duck".split())
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
DRINKS = tuple("tea coffee juice milk cake soup bread pie".split())
