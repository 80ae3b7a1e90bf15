"""``hyperdflash capture`` through a real engine equals the target's own states."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from sglang_hyperdflash.commands.train import captured
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.samples import OnlineFeatures
from sglang_hyperdflash.training.store.reader import StoreReader
from tests.conftest import EXAMPLE
from tests.waiting import PATIENCE
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


def capture(target_dir, data, out, share: str) -> str:
    command = ["capture", "--target", target_dir, "--data", data, "--out", out, "--share", share]
    command += ["--dtype", "float32", "--shard-mib", 1, "--engine-args", json.dumps(ENGINE)]
    # Without --verbose its processes start another environment than the template has.
    ended = run_command(*command, "--verbose", timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_captured_states_are_the_targets_own(target_dir, data, tmp_path):
    """Two engines fill one store at the same time."""
    out = tmp_path / "states"
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(partial(capture, target_dir, data, out), ("1/2", "2/2")))
    assert all("GiB to write" in each for each in said)
    source, target = StoreReader(out), LocalTarget(target_dir)
    online = OnlineFeatures(target, source.samples)
    assert [len(s.spans) for s in source.samples] == [1, 2, 1, 2, 1, 2]
    assert max(len(s.tokens) for s in source.samples) > 2 * ENGINE["chunked_prefill_size"]
    for i in range(len(source.samples)):
        found, wanted = source.states([i]).residual, online.states([i]).residual
        assert found.shape == wanted.shape
        # Relative to their size: residuals reach the hundreds.
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    shards = sorted((out / "shards").iterdir())
    assert len(shards) > 1
    names = [".hyperdflash.json", "manifests", "shards", "verified"]
    assert sorted(p.name for p in out.iterdir()) == names
    counts = [len([p for p in shards if p.name.startswith(f"capture-{i}-of-2")]) for i in (1, 2)]
    assert min(counts) >= 1 and sum(counts) == len(shards)
    assert f" in {'1 shard' if counts[1] == 1 else f'{counts[1]} shards'} ({out})" in said[1]

    before = {p: p.stat().st_mtime_ns for p in shards}
    last = shards[-1]
    size = last.stat().st_size
    last.unlink()
    assert f", {counts[1] - 1} already in {out}" in capture(target_dir, data, out, "2/2")
    assert [p for p in shards if p.stat().st_mtime_ns != before[p]] == [last]
    again = StoreReader(out).states([len(source.samples) - 1])
    wanted = online.states([len(source.samples) - 1]).residual  # other batches, other last bits
    assert (again.residual - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert last.stat().st_size == size

    config, norm = (
        load_config(EXAMPLE / "drafter"),
        BorrowedTarget(TargetFiles(str(target_dir))).final.norm,
    )
    assert len(captured((out,), config, norm).samples) == len(source.samples)
    with pytest.raises(ValueError, match="from another target: its norm_fingerprint is"):
        captured((out,), config, norm + 1)
    other = replace(config, target=replace(config.target, hc_head_fingerprint="other"))
    with pytest.raises(ValueError, match="from another target: its hc_head_fingerprint is"):
        captured((out,), other, norm)
