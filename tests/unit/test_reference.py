"""The committed reference pages are what the code says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from docs.reference import generate
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Pages of a process of their own: other tests load SGLang's modules otherwise."""
    out = tmp_path_factory.mktemp("pages")
    command = [sys.executable, "-m", "docs.reference.generate", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return out


@pytest.mark.parametrize("name", generate.PAGES)
def test_the_committed_page_is_generated_from_this_code(name, fresh):
    page = (fresh / name).read_text(encoding="utf-8")
    assert page.count("\n| ") > 5
    assert (generate.HERE / name).read_text(encoding="utf-8") == page, "run: make reference"


def test_no_other_page_is_there():
    assert {path.name for path in generate.HERE.glob("*.md")} == set(generate.PAGES)
