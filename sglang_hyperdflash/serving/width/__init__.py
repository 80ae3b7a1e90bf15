"""The verify width: how many rows of every request a round verifies."""
