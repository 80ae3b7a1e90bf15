"""The words that the families draw from: few and common, so that a tiny model learns them."""

from __future__ import annotations

NAMES = (
    "Ann",
    "Ben",
    "Carl",
    "Dora",
    "Emma",
    "Finn",
    "Gina",
    "Hugo",
    "Ivan",
    "Jane",
    "Kim",
    "Leo",
    "Mia",
    "Nora",
    "Omar",
    "Paul",
)
ITEMS = (
    "apples",
    "pears",
    "plums",
    "books",
    "pens",
    "cards",
    "coins",
    "shells",
    "stamps",
    "eggs",
    "nuts",
    "cups",
)
THINGS = (
    "apple",
    "pear",
    "plum",
    "book",
    "pen",
    "card",
    "coin",
    "shell",
    "stamp",
    "egg",
    "nut",
    "cup",
)
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
CITIES = ("Oslo", "Rome", "Paris", "Cairo", "Lima", "Delhi", "Kyoto", "Berlin", "Madrid", "Dublin")
PETS = ("cat", "dog", "fox", "owl", "hen", "pony", "goat", "duck")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DRINKS = ("tea", "coffee", "juice", "milk", "cake", "soup", "bread", "pie")
