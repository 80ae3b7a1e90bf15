"""Drafts copied from a request's own text: what they save an untrained drafter, and wrong ones."""

from functools import partial

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.serving.scheduler.metrics import COPIED, COPIES_ACCEPTED
from sglang_hyperdflash.serving.settings import COPY
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.asking import FEW, assert_cases, samples
from tests.engine.conftest import FP32, greedy, greedy_all, ids, install_plugin

pytestmark = pytest.mark.xdist_group("pair")

# While the file is there, each draft is copied from one place too far.
SHIFTED = """
from pathlib import Path

from triton_ops.copies import parts

def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    begin = "sglang_hyperdflash.serving.drafting.copies.CopyHistory.begin"
    HookRegistry.register(begin, shift, HookType.AFTER)

def shift(_, self, *given):
    if Path({file!r}).exists():
        drafts = parts(self.copies.rows)[0]
        drafts.copy_(drafts.roll(-1, 1))
"""


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    return tmp_path_factory.mktemp("copies") / "shifted"


@pytest.fixture(scope="module")
def server(servers, target_dir, shifted):
    """It remembers 64 tokens of a request, fewer than its prompt and answer have."""
    draft = shifted.with_name("untrained")
    assert main(["init", "--target", str(target_dir), "--out", str(draft)]) == 0
    plugin = install_plugin(shifted.parent, "shifted", SHIFTED.format(file=str(shifted)))
    arguments = (*FP32, "--enable-metrics", *hyperdflash_arguments(draft))
    yield servers.get("copies", target_dir, *arguments, environment={COPY: "64"} | plugin)
    servers.stop("copies")


def test_wrong_copies_cost_acceptance_and_no_token(server, shifted, own_prompts, baseline):
    """Long greedy answers of a tiny target repeat themselves; seeded ones do so less."""
    saved = []
    for wrong in (False, True):
        if wrong:
            shifted.touch()
        before = [sum(samples(server, name).values()) for name in (COPIED, COPIES_ACCEPTED)]
        answers = greedy_all(server, own_prompts, 4, partial(greedy, max_new_tokens=96))
        assert ids(answers) == baseline["long"]
        after = [sum(samples(server, name).values()) for name in (COPIED, COPIES_ACCEPTED)]
        copied, accepted = (b - a for a, b in zip(before, after, strict=True))
        assert copied >= accepted >= 0
        correct = sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers)
        saved.append((correct, accepted / max(copied, 1)))
        assert_cases(server, FEW, own_prompts, baseline)
    (correct, share), (wrong_correct, wrong_share) = saved
    rounds = 96 * len(own_prompts) - correct
    assert correct > rounds / 3, "four tokens in three rounds, and more"
    # Of a text of one token over and over a shifted copy is right.
    assert wrong_correct < 0.9 * correct and wrong_share < 0.75 * share, saved
