"""Errors that the user of ``python -m eval`` can fix, printed as one line, and exit codes."""

from sglang_hyperdflash.tools.errors import HyperDFlashError

# OSError includes the errors of requests. Every other exception keeps its traceback.
USER_ERRORS = (HyperDFlashError, OSError)
FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130


class EvalError(HyperDFlashError):
    """A command cannot work; the text says what was expected, what was found and what to do."""


def one_line(error: BaseException) -> str:
    """The first line of an error, followed by the last one of a longer text such as a log's end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
