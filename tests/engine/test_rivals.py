"""The rivals on the portable target answer as the baseline, and draft as plain torch decoders.

A comparison with a rival that is served wrongly would be worth nothing.
"""

from __future__ import annotations

import pytest

from eval.methods import resolve
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, greedy, greedy_all, ids
from tests.engine.drafters import assert_lengths_vary
from tests.engine.reference_decoder import block_draft, chain_draft, decode

pytestmark = pytest.mark.slow
# Prompts and tokens of the plain decoder, which rereads its prefix for every draft of a chain.
COMPARED, COMPARED_TOKENS = 3, 36
NAMES = ("mtp3", "mtp6", "dflash6", "dflash2-style", "dspark-style", "hyperdflash6")
# The committed drafts.
FOLDERS = {
    "mtp": EXAMPLE / "mtp",
    "dflash": EXAMPLE / "dflash",
    "dspark_style": EXAMPLE / "dspark_style",
    "dflash2_style": EXAMPLE / "dflash2_style",
    "hyperdflash": EXAMPLE / "hyperdflash",
    "hyperdflash2": EXAMPLE / "drafter",
}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_and_tau(servers, target_dir, own_prompts, own_reference, name):
    """Histograms of single requests, entry by entry: so tau and every position's acceptance."""
    drafts = {f"{kind}_draft": str(path) for kind, path in FOLDERS.items()}
    (_, method) = resolve(["baseline", name], drafts, {})
    environment = dict(method.environment)
    server = servers.get(name, target_dir, *FP32, *method.arguments, environment=environment)
    answers = greedy_all(server, own_prompts, 8)
    assert ids(answers) == own_reference
    alone = [greedy(server, prompt, COMPARED_TOKENS) for prompt in own_prompts[:COMPARED]]
    servers.stop(name)
    steps = int(name[3:]) if name.startswith("mtp") else 0
    folder, target = FOLDERS[name.replace("-", "_").rstrip("36")], LocalTarget(target_dir)
    draft = chain_draft(target, folder, steps) if steps else block_draft(target, folder)
    assert_lengths_vary([counters(answer["meta_info"])[2] for answer in alone])
    for prompt, answer in zip(own_prompts, alone, strict=False):
        expected, histogram = decode(target, draft, prompt, COMPARED_TOKENS, None)
        assert answer["output_ids"] == expected
        correct, rounds, found = counters(answer["meta_info"])
        assert found + [0] * (len(histogram) - len(found)) == histogram
        assert (rounds, correct) == (sum(histogram), sum(i * n for i, n in enumerate(histogram)))
