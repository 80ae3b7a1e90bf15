"""States that stay on disk: computed once by all processes together, refused to another target."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch

from sglang_hyperdflash.tools import ownership
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training import cached as cached_module
from sglang_hyperdflash.training.cached import cached
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample
from tests.unit.training.conftest import FeatureCache
from tests.waiting import PATIENCE

SAMPLES = [Sample.continuation([5, 9, 7, 11, 4, 8, 6][:n], 2) for n in (7, 3, 5, 7)]


class Counting:
    """A target that counts the rows it computes."""

    def __init__(self, target: LocalTarget, scale: float = 1.0) -> None:
        self.target, self.scale, self.rows = target, scale, 0
        self.hc_head, self.final, self.config = target.hc_head, target.final, target.config

    def features(self, tokens, layer_ids):
        self.rows += len(tokens)
        return tuple(self.scale * x for x in self.target.features(tokens, layer_ids))


@pytest.mark.parametrize("layer_ids", [(), (1, 3)])
def test_they_are_the_cache_s_and_are_computed_once(target, tmp_path, layer_ids):
    counting, world = Counting(target), ProcessGroup()
    expected = FeatureCache(target, SAMPLES, layer_ids=layer_ids)
    for rows in (len(SAMPLES) + 1, 1):  # one more, to know the target by
        counting.rows = 0
        kept = cached(tmp_path / "states", counting, SAMPLES, layer_ids, world)
        assert counting.rows == rows
        assert [s.tokens.tolist() for s in kept.samples] == [s.tokens for s in SAMPLES]
        for indices in ([0, 1, 2, 3], [2], [3, 1]):
            states, wanted = vars(kept.states(indices)), vars(expected.states(indices))
            torch.testing.assert_close(states, wanted, rtol=2e-2, atol=2e-2)
            assert {each.dtype for each in states.values()} == {torch.bfloat16}


def test_processes_share_the_work_and_the_states(target, tmp_path, monkeypatch):
    monkeypatch.setattr(cached_module, "SHARD_BYTES", 1)  # a shard for every sample
    together = Barrier(2)

    def run(rank: int) -> tuple[int, torch.Tensor]:
        world, counting = ProcessGroup(), Counting(target)
        world.rank, world.size, world.on_main = rank, 2, lambda _: together.wait(PATIENCE)
        kept = cached(tmp_path, counting, SAMPLES, (), world)
        return counting.rows - 1, kept.states([0, 1, 2, 3]).residual

    with ThreadPoolExecutor() as threads:
        (rows, states), (others, same) = threads.map(run, range(2))
    assert rows == others == 2 and torch.equal(states, same)
    assert len(list(tmp_path.glob("*/shards/*"))) == len(SAMPLES)


def test_another_target_is_refused_and_other_samples_or_layers_have_a_store(target, tmp_path):
    for samples, layer_ids in ((SAMPLES, ()), (SAMPLES[:2], ()), (SAMPLES, (2,))):
        cached(tmp_path, target, samples, layer_ids, ProcessGroup())
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(HyperDFlashConfigError, match="another target"):
        cached(tmp_path, Counting(target, 2.0), SAMPLES, (), ProcessGroup())


def test_a_cut_computation_is_resumed_after_another_run_s(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cached_module, "SHARD_BYTES", 1)
    world, waited = ProcessGroup(), []

    class Stopped(Counting):
        def features(self, tokens, layer_ids):
            if self.rows == 2:
                raise KeyboardInterrupt
            return super().features(tokens, layer_ids)

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, Stopped(target), SAMPLES, (), world)
    (store,) = tmp_path.iterdir()
    manifest = store / "manifests" / "rank-0.jsonl"
    other = ownership.claim(manifest, cached_module.KIND, {}, is_file=True)
    other.__enter__()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:  # the other run is killed: this one computes
            other.__exit__(None, None, None)

    monkeypatch.setattr(cached_module.time, "sleep", sleep)
    counting = Counting(target)
    kept = cached(tmp_path, counting, SAMPLES, (), world)
    assert len(waited) == 2 and counting.rows == 2 + 1
    assert capsys.readouterr().out.count("rank-0.jsonl") == 1
    assert kept.lengths.tolist() == [7, 3, 5, 7] and kept.states([1]).residual.shape[1] == 3


@pytest.mark.parametrize("broken", [[6], [5, 6, 7]])
def test_samples_with_states_that_are_not_finite_are_counted(target, tmp_path, capsys, broken):
    class Broken(Counting):
        def features(self, tokens, layer_ids):
            wrong = torch.isin(tokens[:, :1], torch.tensor(broken)).unsqueeze(-1)
            states = super().features(tokens, layer_ids)
            return tuple(x.masked_fill(wrong, torch.nan) for x in states)

    samples = [Sample.continuation([first, 9, 7, 11], 2) for first in (5, 6, 7)]
    run = partial(cached, tmp_path / "states", Broken(target), samples, (), ProcessGroup())
    if len(broken) < 3:
        assert [int(sample.tokens[0]) for sample in run().samples] == [5, 7]
        assert "1 of 3" in capsys.readouterr().out
    else:
        with pytest.raises(HyperDFlashConfigError, match="states"):
            run()
