"""What the plugin does to a process of SGLang on a CPU, told by that process."""

import inspect
import logging
import pkgutil
import sys
from logging.handlers import MemoryHandler

from tests.unit.cuda_start import resolved
from tests.unit.other_process import answer, question

# Modules that launcher, tokenizer and detokenizer do without.
HEAVY = (
    "sglang.srt.models.registry",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.model_executor.pool_configurator",
    "sglang.srt.models.dflash",
    "sglang.srt.speculative.dflash_utils",
    "sglang_hyperdflash.serving.worker",
)
MODELS = ("HyperDFlashDraftModel", "PortableDeepSeekV4ForCausalLM")


def main() -> None:
    """Load the plugins, then import what a scheduler does."""
    import sglang.srt.managers.scheduler  # noqa: F401, before plugins, as where one is spawned
    from sglang.srt.plugins import load_plugins

    from sglang_hyperdflash import plugin, seams

    before, logged = set(sys.modules), MemoryHandler(10_000, logging.CRITICAL)
    logging.basicConfig(level=logging.INFO, handlers=[logged], force=True)
    load_plugins()
    early = [name for name in HEAVY if name in sys.modules and name not in before]
    for seam in plugin.SERVING_SEAMS:
        pkgutil.resolve_name(seam.target)
    from sglang.srt.arg_groups import deepseek_v4_hook
    from sglang.srt.models.registry import ModelRegistry

    from docs.reference import generate

    originals = {
        id(inspect.unwrap(pkgutil.resolve_name(seam.target))): seam.target
        for seam in seams.recorded
        if "." not in seam.target.partition(":")[2]
    }
    stale = [
        f"{module.__name__}.{name} is {originals[id(value)]}"
        for module in list(sys.modules.values())
        if inspect.ismodule(module)
        for name, value in list(vars(module).items())
        if id(value) in originals
    ]
    hook = inspect.getclosurevars(deepseek_v4_hook.apply_deepseek_v4_defaults).nonlocals["hook"]
    serving = {seam.target for seam in plugin.SERVING_SEAMS}
    answer(
        {
            "early": early,
            "logged": [record.getMessage() for record in logged.buffer],
            "stale": stale,
            "patched": sorted(seams.in_place & serving),
            "called": hook.__name__,
            "models": [name for name in MODELS if name in ModelRegistry.models],
            "hooks.md": generate.hooks(),
            "resolved": {name: resolved(case) for name, case in question().items()},
        }
    )


if __name__ == "__main__":
    main()
