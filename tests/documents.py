"""The documents as tests see them: pages, fenced blocks with their marks, shell commands.

The line before a fence may hold a mark:

``<!-- untested: REASON -->``     the commands need what a test machine does not have;
``<!-- elsewhere: TEST -->``      another test runs them;
``<!-- background -->``           a server for the blocks after it;
``<!-- file: PATH -->``           the block is that file's content;
``<!-- output of WHAT -->``       the block was printed; a test of its own compares.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES]
PAGES += [*(ROOT / "examples").glob("*/README.md"), *(ROOT / "eval/results").glob("*/README.md")]
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_IN_COMMENT = re.compile(r"^# +((?:hyperdflash|python) (?:.*\\\n# +)*.*)$", re.M)


@dataclass(frozen=True)
class Fence:
    """One fenced block: its page, first line, language, content and mark (empty without one)."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def kind(self) -> str:
        """The mark without what follows its colon."""
        return self.mark.partition(":")[0]


def fences(page: Path) -> list[Fence]:
    text, blocks = page.read_text(), []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        blocks.append(Fence(page, line, match["language"], match["text"], match["mark"] or ""))
    return blocks


def shell_fences(pages: list[Path]) -> list[Fence]:
    return [fence for page in pages for fence in fences(page) if fence.language == "bash"]


def commands(fence: Fence) -> Iterator[list[str]]:
    """The block's commands as words, quotes and continued lines resolved."""
    lines = ""
    for line in fence.text.replace("\\\n", "").splitlines():
        lines += line + "\n"
        try:
            words = shlex.split(lines, comments=True)
        except ValueError:
            continue  # a quote goes on in the next line
        lines = ""
        if words:
            yield words
    if lines:
        raise ValueError(f"{fence.where}: a quote is not closed: {lines!r}")


def commands_in_comments(text: str) -> list[list[str]]:
    """Commands that the comments of a TOML file show, as words."""
    shown = _IN_COMMENT.findall(text)
    return [shlex.split(re.sub(r"\\\n# +", "", command)) for command in shown]


def split_environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Leading ``NAME=value`` words, and the command after them."""
    variables, rest = {}, list(words)
    while rest and re.match(r"[A-Z_][A-Z0-9_]*=", rest[0]):
        name, _, variables[name] = rest.pop(0).partition("=")
    return variables, rest


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())
