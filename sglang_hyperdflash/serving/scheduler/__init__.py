"""Hooks on SGLang's scheduler."""
