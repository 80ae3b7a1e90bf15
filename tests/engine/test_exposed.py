"""HY-V4's own forward, its residual handed out by our hook, through the whole engine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample, States
from tests.conftest import EXAMPLE, ROOT
from tests.engine import exposed_plugin, probes
from tests.engine.conftest import COMMON, captured_prefill, greedy, greedy_all, ids, install_plugin
from tests.engine.drafters import assert_varied, rescale_folder
from tests.engine.test_train_and_serve import recorded, replayed
from tests.waiting import PATIENCE
from tests.warm_start.client import ENVIRONMENT, start

pytestmark = pytest.mark.slow  # unit tests compare every class's residual
TOKENS = 48
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FP32 = ("--dtype", "float32", "--max-total-tokens", "8192", *COMMON)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """An HY-V4 checkpoint of random weights with the tiny target's tokenizer."""
    from transformers import HYV4Config

    folder = tmp_path_factory.mktemp("hy-v4") / "target"
    config = HYV4Config(**SIZES, architectures=["HYV4ForCausalLM"])
    config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"mlp_layer_types": ["dense"] * 3, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EXAMPLE / "target" / name, folder / name)
    script = f"from tests.engine.exposed_plugin import main; main({str(folder)!r})"
    process = start([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **ENVIRONMENT})
    assert process.wait(PATIENCE) == 0
    return folder


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory) -> Path:
    """An untrained drafter with the target's gate, whose blocks differ."""
    folder = tmp_path_factory.mktemp("hy-v4") / "drafter"
    sizes = {"layers": 2, "heads": 2, "kv-heads": 1, "head-dim": 32, "intermediate-size": 96}
    sizes["dependency-rank"] = 0
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    assert main(["init", "--target", str(target), "--out", str(folder), *options]) == 0
    rescale_folder(folder)
    return folder


def renamed(source: Path, folder: Path) -> Path:
    """A copy of target or drafter with the architecture's name in the plugin."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    name, dense = "HYV4ForCausalLM", exposed_plugin.ARCHITECTURE
    path.write_text(path.read_text().replace(f'"{name}"', f'"{dense}"'))
    return folder


def test_answers_are_the_targets_own(servers, target, drafter, own_prompts, tmp_path):
    """And what is drafted in every round is what the residual of a whole prefill leads to."""
    files, prompts, blocks = TargetFiles(str(target)), own_prompts[:6], tmp_path / "blocks.jsonl"
    borrowed = BorrowedTarget(files)
    replay = Replay(Drafter.load(drafter).eval(), borrowed)
    dense = renamed(target, tmp_path / "target")
    source = Path(exposed_plugin.__file__).read_text()
    environment = install_plugin(tmp_path, "dense_hy_v4", source)
    capture = {**environment, CAPTURE_FOLDER: str(tmp_path)}
    options = ("--enable-return-hidden-states", "--disable-radix-cache", *FP32)
    plain = servers.get("hy-v4", dense, *options, environment=capture)
    expected = ids(greedy_all(plain, prompts, 4, ask))
    whole = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    states = []
    for tokens in whole:
        residual, token = captured_prefill(plain, tokens, tmp_path)
        assert residual.shape[1] == 4 * SIZES["hidden_size"]
        states.append(States.without_layers(residual.unsqueeze(0)))
        assert int(borrowed.lm_head(borrowed.final(residual[-1])).argmax()) == token
    servers.stop("hy-v4")
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    environment |= install_plugin(tmp_path, "probes", probes.PLUGIN)
    environment[probes.BLOCKS] = str(blocks)
    arguments = (*FP32, *hyperdflash_arguments(renamed(drafter, tmp_path / "drafter")))
    drafting = servers.get("hy-v4-drafts", dense, *arguments, environment=environment)
    assert ids(greedy_all(drafting, prompts, 4, ask)) == expected
    blocks.unlink()
    compared = []
    for prompt, tokens, known in zip(prompts, whole, states, strict=True):
        assert ask(drafting, prompt)["output_ids"] == tokens[len(prompt) :]
        found = recorded(blocks, tokens, len(prompt))
        sample = Sample.continuation(tokens, 1)
        ours = replayed(replay, sample, known, [at for at, _ in found])
        assert ours == [drafts for _, drafts in found]
        compared += ours
    servers.stop("hy-v4-drafts")
    assert len(compared) >= 200
    assert_varied(compared)
    # Control: the same paths in another order lead to other blocks.
    paths = residual.unflatten(-1, (4, -1)).roll(1, dims=-2).flatten(-2)
    known = States.without_layers(paths.unsqueeze(0))
    wrong = replayed(replay, sample, known, [at for at, _ in found])
    assert sum(a != b for a, b in zip(ours, wrong, strict=True)) > len(found) // 2


def ask(server: Server, prompt: list[int]) -> dict:
    return greedy(server, prompt, TOKENS)
