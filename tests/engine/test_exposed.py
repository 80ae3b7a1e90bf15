"""HY-V4's own forward, its residual handed out by our hook, through the whole engine."""

import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.targets import kinds
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import States
from tests.conftest import EXAMPLE, ROOT
from tests.engine import conftest, exposed_plugin, probes
from tests.engine.conftest import captured_prefill, greedy, greedy_all, ids, probed
from tests.engine.drafters import assert_varied, rescale_folder
from tests.engine.test_train_and_serve import replayed, served_blocks
from tests.waiting import PATIENCE
from tests.warm_start.client import ENVIRONMENT, start

pytestmark = pytest.mark.slow  # unit tests compare every class's residual
TOKENS = 48
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "mlp_layer_types": ["dense"] * 3,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FP32 = ("--dtype", "float32", "--max-total-tokens", "8192", *conftest.COMMON)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Path]:
    """An HY-V4 checkpoint of random weights with the tiny target's tokenizer."""
    from transformers import HYV4Config

    folder = tmp_path_factory.mktemp("hy-v4") / "target"
    HYV4Config(**SIZES, architectures=[exposed_plugin.ARCHITECTURE]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EXAMPLE / "target" / name, folder / name)
    script = f"from tests.engine.exposed_plugin import main; main({str(folder)!r})"
    process = start([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **ENVIRONMENT})
    assert process.wait(PATIENCE) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "TARGETS", (*kinds.TARGETS, exposed_plugin.kind()))
        yield folder


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory) -> Path:
    """An untrained drafter with the target's gate, whose blocks differ."""
    folder = tmp_path_factory.mktemp("hy-v4") / "drafter"
    sizes = "--layers 2 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 96"
    options = ["--out", str(folder), *sizes.split(), "--dependency-rank", "0"]
    assert main(["init", "--target", str(target), *options]) == 0
    rescale_folder(folder)
    return folder


def test_answers_are_the_targets_own(servers, target, drafter, own_prompts, tmp_path):
    """And what is drafted in every round is what the residual of a whole prefill leads to."""
    prompts, blocks = own_prompts[:6], tmp_path / "blocks.jsonl"
    ask = partial(greedy, max_new_tokens=TOKENS)
    borrowed = BorrowedTarget(TargetFiles(str(target)))
    replay = Replay(Drafter.load(drafter).eval(), borrowed)
    source = Path(exposed_plugin.__file__).read_text()
    environment = conftest.install_plugin(tmp_path, "dense_hy_v4", source)
    capture = {**environment, CAPTURE_FOLDER: str(tmp_path)}
    options = ("--enable-return-hidden-states", "--disable-radix-cache", *FP32)
    plain = servers.get("hy-v4", target, *options, environment=capture)
    expected = ids(greedy_all(plain, prompts, 4, ask))
    whole = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    states = []
    for tokens in whole:
        residual, token = captured_prefill(plain, tokens, tmp_path)
        states.append(States.without_layers(residual.unsqueeze(0)))
        assert int(borrowed.lm_head(borrowed.final(residual[-1])).argmax()) == token
    servers.stop("hy-v4")
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    environment |= probed(tmp_path, probes.BLOCKS)
    arguments = (*FP32, *hyperdflash_arguments(drafter))
    drafting = servers.get("hy-v4-drafts", target, *arguments, environment=environment)
    assert ids(greedy_all(drafting, prompts, 4, ask)) == expected
    compared = []
    served = served_blocks(drafting, blocks, prompts, TOKENS, 1)
    for (sample, anchors, drafts), tokens, known in zip(served, whole, states, strict=True):
        assert sample.tokens == tokens
        assert replayed(replay, sample, known, anchors) == drafts
        compared += drafts
    servers.stop("hy-v4-drafts")
    assert len(compared) >= 40  # of 282 at most; the others hold copies
    assert_varied(compared)
