"""``hyperdflash capture`` through a real engine equals the target's own states."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sglang_hyperdflash.commands.train import captured
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.training.captured import CapturedFeatures
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.samples import OnlineFeatures
from tests.conftest import EXAMPLE
from tests.warm_start.client import run_command

ENGINE = {"chunked_prefill_size": 64, "max_total_tokens": 8192, "mem_fraction_static": 0.2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Conversations of one answer and of two, shorter and longer than a prefill chunk."""
    path = tmp_path_factory.mktemp("capture") / "data.jsonl"
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:6]
    questions = [json.loads(line)["messages"][-1]["content"] for line in lines]
    answer = "It costs 3 + 4 = 7 dollars. " * 6
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": answer}] * (1 + i % 2)
        for i, q in enumerate(questions)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def capture(target_dir, data, out) -> str:
    command = ["capture", "--target", target_dir, "--data", data, "--out", out]
    command += ["--dtype", "float32", "--shard-mib", 4, "--engine-args", json.dumps(ENGINE)]
    # Without --verbose its processes start another environment than the template has.
    ended = run_command(*command, "--verbose", timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_captured_states_are_the_targets_own(target_dir, data, tmp_path):
    out = tmp_path / "states"
    first = capture(target_dir, data, out)
    assert "GiB to write" in first
    source, target = CapturedFeatures(out), LocalTarget(target_dir)
    online = OnlineFeatures(target, source.samples)
    assert [len(s.spans) for s in source.samples] == [1, 2, 1, 2, 1, 2]
    assert max(len(s.tokens) for s in source.samples) > 2 * ENGINE["chunked_prefill_size"]
    for i in range(len(source.samples)):
        ours, expected = source.states([i]), online.states([i])
        for name in ("residual", "final"):
            found, wanted = getattr(ours, name), getattr(expected, name)
            assert found.shape == wanted.shape
            # Relative to their size: residuals reach the hundreds.
            assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max(), name
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1
    names = [".hyperdflash.json", "index.json", *(p.name for p in shards)]
    assert sorted(p.name for p in out.iterdir()) == names
    assert f"6 samples in {len(shards)} shards ({out})" in first

    before = {p: p.stat().st_mtime_ns for p in shards}
    content = shards[1].read_bytes()
    shards[1].unlink()
    assert f"{len(shards)} shards, {len(shards) - 1} already" in capture(target_dir, data, out)
    changed = [p for p in shards if p.stat().st_mtime_ns != before[p]]
    assert changed == [shards[1]]
    again = CapturedFeatures(out).states([len(source.samples) - 1])
    torch.testing.assert_close(again.residual, source.states([5]).residual)
    assert len(shards[1].read_bytes()) == len(content)

    config, norm = (
        load_config(EXAMPLE / "drafter"),
        BorrowedTarget(TargetFiles(str(target_dir))).norm,
    )
    assert captured((out,), config, norm).samples == source.samples
    with pytest.raises(ValueError, match="from another target: its norm_fingerprint is"):
        captured((out,), config, norm + 1)
    other = replace(config, target=replace(config.target, hc_head_fingerprint="other"))
    with pytest.raises(ValueError, match="from another target: its hc_head_fingerprint is"):
        captured((out,), other, norm)
