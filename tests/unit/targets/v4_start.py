"""SGLang's own start-up on DeepSeek-V4 configurations, in a process of its own.

Our CPU platform is left out, so SGLang takes the decisions that it takes on a CUDA device.
"""

import re
from dataclasses import asdict
from typing import Any

from tests.unit.other_process import answer, ask, question

FIELDS = re.compile(
    "speculative_.*|kv_cache_dtype|attention_backend|page_size|max_running_requests|"
    "disable_overlap_schedule"
)


def _answer(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.runtime_context import override_platform

    from sglang_hyperdflash.commands.plan import METHODS, Node, budget, resolved_arguments

    node, method = Node(**case["node"]), case["method"]
    options = METHODS[method] | case.get("options", {})
    if "algorithm" in case:
        options["speculative_algorithm"] = case["algorithm"]
    if case["draft"]:
        options["speculative_draft_model_path"] = case["draft"]
    try:
        with override_platform(**case.get("platform", {})):
            resolved = resolved_arguments(case["target"], node, **options).resolved_dict()
            answered = {name: value for name, value in resolved.items() if FIELDS.fullmatch(name)}
            if case.get("whole"):
                answered["whole"] = {name: repr(value) for name, value in resolved.items()}
            if case.get("size", True):
                answered["budget"] = asdict(budget(case["target"], node, method, case["draft"]))
                answered["kv_bytes"] = node.kv_bytes
            return answered
    except (AssertionError, NotImplementedError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer the cases on stdin."""
    from sglang_hyperdflash.cpu.platform import activation

    activation.is_active = lambda: False
    answer({name: _answer(case) for name, case in question().items()})


def start(cases: dict[str, dict[str, Any]], **environment: str) -> dict[str, dict[str, Any]]:
    return ask("tests.unit.targets.v4_start", cases, **environment)


if __name__ == "__main__":
    main()
