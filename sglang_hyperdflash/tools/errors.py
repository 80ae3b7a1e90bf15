"""Errors that a user can fix. Commands print them on one line and exit with code 2."""


class HyperDFlashError(Exception):
    """Base class; the text says what was expected, what was found and what to do."""


class HyperDFlashConfigError(HyperDFlashError, ValueError):
    """A checkpoint, option, file or request that cannot work."""


class BadRow(HyperDFlashConfigError):
    """One row of data that cannot be used; ``reason`` does not name which."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}. Fix or remove it.")
        self.reason = reason


class SeamError(HyperDFlashError, RuntimeError):
    """SGLang is not the version that a hook was written for, or a hooked function changed."""


class ServerFailed(HyperDFlashError, RuntimeError):
    """A server ended or did not answer; the message holds the end of its log."""
