"""What a user can be told in one line."""


class HyperDFlashError(Exception):
    """A fault that the user can mend: what was expected, what was found, what to do."""
