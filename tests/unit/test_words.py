"""README and docs stay short, and words of the project's old dialect do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents import GUIDES

# Words that a page may have; a word is a run of characters with a letter or digit in it.
LIMITS = {
    **{"README": 800, "CONTRIBUTING": 800, "CHANGELOG": 500},
    **{"docs/README": 150, "docs/faq": 700, "docs/install": 600, "docs/serving": 1500},
    **{
        "docs/learning": 1300,
        "docs/operators": 500,
        "docs/observability": 700,
        "docs/sampling": 600,
        "docs/training": 1500,
    },
    **{"docs/benchmarking": 700, "docs/results": 600, "docs/how_it_works": 1000},
    **{"docs/troubleshooting": 1300, "docs/glossary": 500, "docs/comparison": 350},
}
LINES, CHARACTERS, ALL_WORDS = 120, 130, 11_500
# What the field calls these: docs/glossary.md. Names of SGLang's that contain one are let pass.
DIALECT = re.compile(
    r"\blaw_of|\blaws? (?:of|q|p)\b|\b(?:own|same|target's|drafter's) laws?\b|\bstand[- ]ins?\b"
    r"|(?<!sampling_)target[- _]only|\bown kinds\b|\bforeign\b|\banew\b|\bbeside\b|\bnobod"
    r"|\bbehind (?:the|an?|it|them|its|every|all)\b(?! router)|walked_worth|stay_chances"
    r"|\bmine\b|\bdeaf|sharpness|\bdoubts?\b|\bunsure\b|\bmend(?:s|ed|ing)?\b|\brefused drafts?\b",
    re.IGNORECASE,
)
# Its first lines are left as they are.
UNSWEPT = {"exact.py"}
PAGES = [ROOT / f"{name}.md" for name in LIMITS]


def swept() -> list[Path]:
    """README, docs and all Python but the tiny target's training data and :data:`UNSWEPT`."""
    places = ("sglang_hyperdflash", "cpu_engine", "triton_ops", "eval", "examples", "docs")
    files = [file for place in places for file in (ROOT / place).rglob("*")]
    data = {*UNSWEPT, "exchanges", "figures", "__pycache__"}
    kinds = {".py", ".toml", ".md"}
    return PAGES + [f for f in files if f.suffix in kinds and not data & set(f.parts)]


def words(page: Path) -> int:
    text = re.sub(r"<[^>]*>", "", page.read_text())
    return len(re.findall(r"\S*\w\S*", text))


def test_every_page_has_a_limit_and_keeps_it():
    assert set(GUIDES) <= set(PAGES)
    found = {name: words(ROOT / f"{name}.md") for name in LIMITS}
    assert {name: count for name, count in found.items() if count > LIMITS[name]} == {}
    assert sum(words(page) for page in GUIDES) <= ALL_WORDS


def test_lines_are_short_enough_to_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES
    long = [
        f"{page.name}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > CHARACTERS and (page.stem == "README" or not line.startswith("|"))
    ]
    assert long == []


@pytest.mark.parametrize("path", swept(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_word_of_the_old_dialect(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [f"{n}: {found[0]}" for n, line in lines for found in DIALECT.finditer(line)] == []


def test_the_dialect_is_found():
    for text in ("target-only", "behind the anchor", "the law of p", "drafters that met doubt"):
        assert DIALECT.search(text)
    for text in ("behind the router", "behind one Seam", "chain_sampling_target_only"):
        assert not DIALECT.search(text)
