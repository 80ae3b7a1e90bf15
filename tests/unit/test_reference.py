"""The committed reference pages are what the code says."""

from __future__ import annotations

import pytest

from docs.reference import generate


@pytest.mark.parametrize("name", generate.PAGES)
def test_the_committed_page_is_generated_from_this_code(name):
    fresh = generate.PAGES[name]()
    assert fresh.count("\n| ") > 5
    assert (generate.HERE / name).read_text(encoding="utf-8") == fresh, "run: make reference"


def test_no_other_page_is_there():
    assert {path.name for path in generate.HERE.glob("*.md")} == set(generate.PAGES)
