"""Faults injected into every long command: what a re-run gives is what an undisturbed run gives."""
