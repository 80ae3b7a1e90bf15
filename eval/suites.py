"""Known comparisons, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_deepseek_v4"
# Made by examples/tiny_deepseek_v4/exchange_prompts.py.
HELD_OUT = Path("build/held_out")
# fp32: at bf16 a near-tie may round differently in a 7-row and a 1-row pass.
SERVER = "--dtype float32 --mem-fraction-static 0.1 --max-total-tokens 8192 --sleep-on-idle"
SERVER += " --log-level warning"


def tiny() -> dict[str, Any]:
    """Every way to draft six, on the tiny DeepSeek-V4: three benchmarks, its own kinds of text."""
    return {
        "target": str(EXAMPLE / "target"),
        "methods": [
            "target",
            "mtp6",
            "dflash6",
            "dspark6",
            "dflash2",
            "hyperdflash6",
            "hyperdflash2",
        ],
        "mtp_draft": str(EXAMPLE / "mtp"),
        "dflash_draft": str(EXAMPLE / "dflash"),
        "dspark6_draft": str(EXAMPLE / "dspark_style"),
        "dflash2_draft": str(EXAMPLE / "dflash2_style"),
        "hyperdflash_draft": str(EXAMPLE / "hyperdflash"),
        "hyperdflash2_draft": str(EXAMPLE / "drafter"),
        "benchmarks": [
            "gsm8k",
            "humaneval",
            "mt-bench",
            *(str(HELD_OUT / f"{kind}.jsonl") for kind in ("math", "code", "chat")),
        ],
        "temperature": [0.0, 1.0],
        "num_prompts": 20,
        "max_new_tokens": 64,
        "rounds": 3,
        "threads": 1,
        "server_args": SERVER.split(),
    }


SUITES = {"tiny": tiny}
