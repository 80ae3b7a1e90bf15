"""Stores of the tiny target's own answers, and a learner on them, as tests use them."""

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.cached import identity_of
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.learner import Learner, Policy
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.stream import StreamReader
from sglang_hyperdflash.training.store.writer import StoreWriter, open_writer

SHAPE = DrafterShape(layers=1, heads=2, kv_heads=1, head_dim=32, intermediate_size=64)
RECIPE = Recipe(batch=8, anchors=8, every=2, warmup_steps=2, bf16=False)
POLICY = Policy(newest=350, judges=64, passes=10**6)
PROMPT, ANSWER = 4, 14


def recorded(target, count: int) -> list[tuple[Sample, torch.Tensor]]:
    """Greedy answers to random prompts, each with its residual ``[S, m*d]``."""
    g = torch.Generator().manual_seed(0)
    new = tokens = torch.randint(10, 1300, (count, PROMPT), generator=g)
    cache, residuals = target.new_cache(count, PROMPT + ANSWER), []
    places = torch.zeros(count).long()
    while places[0] + new.shape[1] <= PROMPT + ANSWER:
        hidden, residual = target.step(new, places, cache)
        residuals.append(residual)
        places = places + new.shape[1]
        new = target.lm_head(hidden[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, new], 1)
    residual = torch.cat(residuals, 1)
    samples = [Sample.continuation(row, PROMPT) for row in tokens[:, :-1].tolist()]
    return list(zip(samples, residual, strict=True))


def writer(folder: Path, target) -> AbstractContextManager[StoreWriter]:
    return open_writer(folder, identity_of(target, ()), "server", "hyperdflash record", {})


def add(opened: StoreWriter, content: list[tuple[Sample, torch.Tensor]]) -> None:
    """Shards of twenty samples."""
    for start in range(0, len(content), 20):
        samples, states = zip(*content[start : start + 20], strict=True)
        opened.add(opened.position, samples, [(rows,) for rows in states])


def new_drafter(target, **shape) -> Drafter:
    """An untrained drafter of the tiny target."""
    torch.manual_seed(0)
    facts = TargetFacts.from_config(target.config.to_dict())
    raw = draft_config(facts, target.hc_head, dataclasses.replace(SHAPE, **shape), 4)
    drafter = Drafter(raw)
    drafter.inherit(target.hc_head)
    return drafter


def random_drafter(target, **shape) -> Drafter:
    """One with a dependency head, whose blocks differ from each other."""
    drafter = new_drafter(target, **{"dependency_rank": 10, **shape})
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            if value.dim() == 2 and "reducer" not in name:
                value.normal_(std=2 * value.shape[-1] ** -0.5)
    return drafter.eval()


def learn_arguments(target, given: Path, made: Path, options: str) -> list[str]:
    """A ``hyperdflash learn`` on the draft and the store of one folder, with its own in another."""
    places = {"target": target, "draft": given / "draft", "store": given / "store"}
    places |= {"publish": made / "published", "work": made / "work"}
    named = (part for name, place in places.items() for part in (f"--{name}", str(place)))
    return ["learn", *named, *options.split()]


def refreshed(store: Path, vocabulary: int) -> StreamReader:
    stream = StreamReader(store, 2048, vocabulary)
    stream.refresh(ProcessGroup())
    return stream


def new_learner(target, store: Path, folder: Path, *, draft: Path | None = None, **changes):
    """A :class:`Learner` from an untrained drafter, which is served unless ``draft`` is given."""
    drafter, recipe = new_drafter(target), dataclasses.replace(RECIPE, **changes)
    if draft is None:
        draft = folder / "draft"
        drafter.save(draft)
    stream, lines = refreshed(store, target.config.vocab_size), list[str]()
    given = drafter, target, stream, recipe, folder / "work", ProcessGroup()
    places = {"draft": draft, "published": folder / "published"}
    learner = Learner(*given, **places, policy=POLICY, say=lines.append)
    learner.lines = lines
    return learner


class Enough(Exception):
    """Ends a run that has no end."""


def run(learner: Learner, steps: int) -> None:
    """To the checkpoint after so many steps, or to a cut between two."""

    def count(trainer, _report):
        if trainer.state["step"] > steps:
            raise Enough

    with pytest.raises(Enough):
        learner.run(learner.published, count)
