"""``python -m eval.dealing``: padding and waiting in steps that ``training.deal`` deals.

*Before* is commit b6fd39dd: sorted samples were dealt one by one, then cut into micro batches.
"""

import argparse
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from sglang_hyperdflash.targets.chats import TemplateChats
from sglang_hyperdflash.targets.files import load_tokenizer
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.deal import deal, sample_rows
from sglang_hyperdflash.training.samples import InMemory, Passes

BLOCK, ANCHORS, STEPS = 7, 512, 60
SHAPES = ((1, 32, 4), (8, 32, 4), (8, 128, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4))
LEVELS = (0.1, 0.5, 0.9, 0.99, 1.0)


def before(tokens: list[int], size: int, most: int) -> list[list[list[int]]]:
    """Every process's micro batches, as indices."""
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    shares = [order[rank::size] for rank in range(size)]
    return [[share[i : i + most] for i in range(0, len(share), most)] for share in shares]


def cell(source: InMemory, world: int, batch: int, micro: int) -> dict[str, list[float]]:
    """Of each way: padded over real tokens, padded over real rows, slowest process over mean."""
    passes, sums = Passes(source.counts, batch, seed=0), torch.zeros(2, 5, dtype=torch.double)
    for step in range(STEPS):
        chosen = passes.batch(step)
        tokens, answers = source.lengths[chosen], source.answers[chosen]
        sizes = zip(tokens.tolist(), answers.tolist(), strict=True)
        rows = torch.tensor([sample_rows(*size, ANCHORS, BLOCK) for size in sizes])
        blocks = answers.clamp(max=ANCHORS)
        ways = partial(deal, rows.tolist()), partial(before, tokens.tolist())
        for number, way in enumerate(ways):
            padded, loads = 0, torch.zeros(world)
            for rank, share in enumerate(way(world, micro)):
                for part in share:
                    padded += len(part) * tokens[part].max()
                    loads[rank] += len(part) * (tokens[part].max() + BLOCK * blocks[part].max())
            new = padded, tokens.sum(), loads.sum(), rows.sum(), world * loads.max()
            sums[number] += torch.tensor(new)
    padded, tokens, work, rows, slowest = sums.T
    ratios = torch.stack([padded / tokens, work / rows, slowest / work], 1)
    return dict(zip(("dealt", "before"), ratios.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, count in (("--tokenizer", None), ("--conversations", "+"), ("--out", None)):
        parser.add_argument(name, nargs=count, required=True)
    args, levels = parser.parse_args(), torch.tensor(LEVELS)
    chats, result = TemplateChats(load_tokenizer(args.tokenizer)), {"provenance": provenance()}
    files = {Path(p).stem: load_samples([p], chats, 1 << 20).samples for p in args.conversations}
    for name, samples in (files | {"all": list(chain(*files.values()))}).items():
        source, cells = InMemory(samples), result.setdefault(name, {})
        for kind in ("lengths", "answers"):
            cells[kind] = getattr(source, kind).float().quantile(levels).tolist()
        cells |= {"world {}, batch {}, micro {}".format(*s): cell(source, *s) for s in SHAPES}
    write_json(Path(args.out), {"quantiles": LEVELS} | result, indent=1)


if __name__ == "__main__":
    main()
