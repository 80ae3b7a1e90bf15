"""States that stay on disk: the cache's own, computed once, refused to another target."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from sglang_hyperdflash.tools import ownership
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training import kept_states as kept_states_module
from sglang_hyperdflash.training.kept_states import kept_states
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import FeatureCache, Sample

SAMPLES = [Sample.continuation([5, 9, 7, 11, 4, 8, 6][:n], 2) for n in (7, 3, 5, 7)]


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


class Counting:
    """A target that counts the rows it computes."""

    def __init__(self, target: LocalTarget) -> None:
        self.target, self.rows = target, 0

    def features(self, tokens, layer_ids):
        self.rows += len(tokens)
        return self.target.features(tokens, layer_ids)


@pytest.mark.parametrize("layer_ids", [(), (1, 3)])
def test_they_are_the_cache_s_and_are_computed_once(target, tmp_path, layer_ids):
    counting, world = Counting(target), ProcessGroup()
    cached = FeatureCache(target, SAMPLES, layer_ids=layer_ids)
    for rows in (len(SAMPLES) + 1, 1):  # one more, to know the target by
        counting.rows = 0
        kept = kept_states(tmp_path / "states", counting, SAMPLES, layer_ids, world)
        assert counting.rows == rows
        for indices in ([0, 1, 2, 3], [2], [3, 1]):
            found, expected = kept.states(indices), cached.states(indices)
            for name in ("residual", "final", "layers"):
                one, other = getattr(found, name), getattr(expected, name)
                assert one.dtype == torch.float32 and one.shape == other.shape
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert len(list((tmp_path / "states").iterdir())) == 1


def test_other_samples_or_layers_have_a_file_of_their_own(target, tmp_path):
    world = ProcessGroup()
    for samples, layer_ids in ((SAMPLES, ()), (SAMPLES[:2], ()), (SAMPLES, (2,))):
        kept_states(tmp_path, target, samples, layer_ids, world)
    assert len(list(tmp_path.glob("*.states"))) == 3


def test_another_target_is_refused(target, tmp_path):
    class Other(Counting):
        def features(self, tokens, layer_ids):
            return tuple(2 * x for x in super().features(tokens, layer_ids))

    kept_states(tmp_path, target, SAMPLES, (), ProcessGroup())
    with pytest.raises(HyperDFlashConfigError, match=r"another target.* differ by 50%"):
        kept_states(tmp_path, Other(target), SAMPLES, (), ProcessGroup())


def test_a_cut_computation_leaves_no_file(target, tmp_path):
    class Stopped(Counting):
        def features(self, tokens, layer_ids):
            if len(tokens) > 1:
                raise KeyboardInterrupt
            return super().features(tokens, layer_ids)

    with pytest.raises(KeyboardInterrupt):
        kept_states(tmp_path, Stopped(target), SAMPLES, (), ProcessGroup())
    assert not list(tmp_path.glob("*.states"))


def test_a_run_that_computes_them_already_is_waited_for(target, tmp_path, monkeypatch):
    """Found as: two runs of a study began at once, and wrote to one partial file."""
    world, waited = ProcessGroup(), []
    counting = Counting(target)
    with ExitStack() as other:
        other.enter_context(ownership.lock(tmp_path, kept_states_module.KIND))

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 2:  # the other run is killed: this one computes
                other.close()

        monkeypatch.setattr(kept_states_module.time, "sleep", sleep)
        kept = kept_states(tmp_path, counting, SAMPLES, (), world)
    assert len(waited) == 2 and counting.rows == len(SAMPLES) + 1
    assert kept.states([1]).residual.shape[1] == 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".states"]
