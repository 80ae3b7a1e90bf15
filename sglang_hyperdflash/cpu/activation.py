"""The platform's former entry point: drop this folder once ``make setup`` has run again."""

from cpu_engine.platform.activation import activate

__all__ = ["activate"]
