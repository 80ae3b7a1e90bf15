"""What the user of ``python -m eval`` can fix, how it is said (one line), and exit codes."""

from __future__ import annotations

from sglang_hyperdflash.tools.errors import HyperDFlashError

# What a user can fix (OSError: requests' errors as well). All else keeps its traceback.
USER_ERRORS = (HyperDFlashError, OSError)
FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130


class EvalError(HyperDFlashError):
    """A command that cannot work: what was expected, what was found, what to do."""


def one_line(error: BaseException) -> str:
    """An error as one line: its first line and, of a longer text (a log's end), its last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
