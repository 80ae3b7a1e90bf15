"""The platform's former entry point, for environments installed before ``cpu_engine/``."""
