"""The trainer: samples, states, objective, drafter, steps."""
