"""Servers of the small V4 checkpoint, and the questions that every test asks them."""

import json
import random
from itertools import zip_longest
from pathlib import Path

from eval import rivals
from sglang_hyperdflash.tools.server_process import Server
from tests.engine.conftest import install_plugin
from tests.engine.v4 import drafts
from tests.engine.v4.plugin import ENVIRONMENT

# The pool is --max-total-tokens; what else fills the machine's memory must not matter.
ARGUMENTS = ("--skip-tokenizer-init", "--mem-fraction-static", "0.8", "--sleep-on-idle")
ARGUMENTS += ("--max-running-requests", "4", "--disable-cuda-graph")
ARGUMENTS += ("--dsa-topk-backend", "torch", "--log-level", "info")
POOL = ("--max-total-tokens", "8192", "--swa-full-tokens-ratio", "0.5")
PLUGIN = "from tests.engine.v4.plugin import load  # noqa: F401\n"
Answers = list[list[int]]


def start(
    servers,
    name: str,
    target: Path,
    folder: Path,
    *arguments: str,
    source: str = PLUGIN,
    pool: tuple[str, ...] = POOL,
    **environment: str,
) -> Server:
    """A server ``v4-NAME`` with the replacements.

    Args:
        folder: a place for the plugin. source: of the plugin's module.
        pool: arguments that size the K/V pools.
        environment: what the plugin reads.
    """
    plugin = folder / f"plugin-{name}"
    plugin.mkdir()
    environment |= ENVIRONMENT | install_plugin(plugin, "v4", source)
    environment |= rivals.environment(arguments, environment)
    return servers.get(f"v4-{name}", target, *ARGUMENTS, *pool, *arguments, environment=environment)


def prompts(*lengths: int, seed: int = 0) -> Answers:
    """Random prompts of these lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(5, 1000) for _ in range(length)] for length in lengths]


def ask(server: Server, batch: Answers, tokens: int, name: str = "f", **options) -> list[dict]:
    """Greedy answers of one batch, in flight together; request ids are ``{name}{length}``."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    rids = [f"{name}{len(prompt)}" for prompt in batch]
    given = {"input_ids": batch, "sampling_params": sampling, "rid": rids}
    return server.generate(timeout=1800, **given, **options)


def known(folder: Path, batch: Answers, answers: Answers) -> dict[str, str]:
    """The environment of an oracle that knows these answers, and those it was given before."""
    path = folder / "answers.json"
    every = json.loads(path.read_text()) if path.is_file() else []
    every += [{"prompt": p, "ids": a} for p, a in zip(batch, answers, strict=True)]
    path.write_text(json.dumps(every))
    return {drafts.ANSWERS: str(path)}


def accepted(answers: list[dict]) -> list[int]:
    """Rounds by the number of drafts that were accepted."""
    rounds = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
    return list(map(sum, zip_longest(*rounds, fillvalue=0)))


def own_blocks(path: Path) -> dict[tuple[str, int], tuple[int, list[int]]]:
    """What the drafter itself proposed: request and length to the anchor and its drafts."""
    blocks = {}
    for line in path.read_text().splitlines():
        rid, length, anchor, block = json.loads(line)
        blocks[rid, length] = (anchor, block)
    return blocks
