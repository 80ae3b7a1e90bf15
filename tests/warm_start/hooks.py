"""Imported by the template: SGLang hooks a method without a look at what all modules import.

For every hook it searches all modules, 30 ms each time, for others that imported the name: a
second of every start. No module imports a method; ``test_warm_start.py`` compares what is hooked.
"""

from sglang.srt.plugins import hook_registry

_everywhere = hook_registry._propagate_patch


def _propagate(original: object, wrapped: object, source: object) -> int:
    return 0 if isinstance(source, type) else _everywhere(original, wrapped, source)


hook_registry._propagate_patch = _propagate
