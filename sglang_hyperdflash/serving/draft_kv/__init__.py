"""The draft K/V: which attention reads it, and how large its pool is."""
