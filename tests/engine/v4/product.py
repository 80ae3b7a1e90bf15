"""Every verify width, every offset of the compress ratios, every accepted length, module by module.

Runs inside a server, once its runners are built and before it serves. Of SGLang, as it is: the
model's own ``Compressor`` and ``C4Indexer`` modules with the checkpoint's weights, the attention
backend of each width (the one that a round of that width uses), its metadata, the pools and their
addresses. In torch, because their kernels need a GPU: the planner of the rings
(``tests/engine/v4/plans.py``, which ``test_planner`` compares with ``c_plan.cuh`` itself), the
kernels that use its plans (``compressor.py``), the index's scores and top-k (``sparse.py``).

Hidden states are drawn, other ones for every request and position, so a state in a wrong place is a
wrong state. A case is a request whose prompt was prefilled in chunks, or is in part another
request's (a radix hit), one block of which a number of rows is right, and a second block that is
right throughout: what it compresses, it finds where the first one left it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.engine.v4.plans import Rings
from tests.engine.v4.states import Pools, live

PRODUCT = "V4_PRODUCT"  # a file for the JSON report
WIDTHS = range(2, 11)
# Every offset of both ratios; first windows, the ends of a page and of a window of 128.
PREFIXES = (*range(1, 9), *range(385, 513))
AT_ONCE = 34
CONTROL = range(385, 393)
PAGE, PAGES = 256, 3
C4, C128 = 1, 2  # layers of the checkpoint, one of each ratio
# The index chooses 512 of more than 2048 tokens' windows; here 64 of these requests' 96 to 133.
CHOSEN = 64
LAST = 16  # compressed keys that are compared, those before the block among them


@dataclass
class Truth:
    """One-row decoding: what each step left.

    rows, keys: of each state, ``[steps, requests, words]`` int64; a key counts where its window
        ends. chosen: ``[steps, requests, CHOSEN]``.
    """

    rows: list[torch.Tensor]
    keys: list[torch.Tensor]
    chosen: torch.Tensor


class Requests:
    """Requests of given prompt lengths, with pages, drawn hidden states and SGLang's pools."""

    def __init__(self, worker: Any, prefixes: tuple[int, ...]) -> None:
        runner = worker.target_worker.model_runner
        self.worker, self.runner, n = worker, runner, len(prefixes)
        self.table = runner.req_to_token_pool.req_to_token
        self.pools = Pools(runner.token_to_kv_pool, self.table)
        self.kinds = [kind for kind in self.pools.kinds if kind.layer in (C4, C128)]
        self.layers = [layer.self_attn for layer in runner.model.model.layers]
        self.requests, self.prefix = torch.arange(1, n + 1), torch.tensor(prefixes)
        self._allocate(runner.token_to_kv_pool_allocator, n)
        config = runner.model_config.hf_text_config
        draw = torch.Generator().manual_seed(sum(prefixes))
        self.draw = lambda rows, width: torch.randn(rows, width, generator=draw).bfloat16()
        count = PAGE * PAGES
        self.x, self.q = (
            self.draw(n * count, width).view(n, count, width)
            for width in (config.hidden_size, config.q_lora_rank)
        )
        # Each second request begins with the first page of the one before it.
        self.hits = torch.arange(1, n, 2) if min(prefixes) > PAGE else torch.arange(0)
        for tensor in (self.x, self.q):
            tensor[self.hits, :PAGE] = tensor[self.hits - 1, :PAGE]
        self.table[self.hits + 1, :PAGE] = self.table[self.hits, :PAGE]
        for kind in self.kinds:  # what nothing has written is other than what anything writes
            kind.rows[:-1].normal_(generator=draw)
            kind.pages.view(torch.uint8).fill_(255)
        self._prefill()
        self.before = [(kind.rows.clone(), kind.pages.clone()) for kind in self.kinds]

    def _allocate(self, allocator: Any, n: int) -> None:
        """Pages of several requests between each other, and other ones for sliding windows."""
        allocator.clear()
        slots, windows = (
            one.alloc(n * PAGES * PAGE).view(-1, PAGE)
            for one in (allocator.full_attn_allocator, allocator.swa_attn_allocator)
        )
        allocator.set_full_to_swa_mapping(slots.flatten(), windows.flip(0).flatten())
        own = slots.view(PAGES, n, PAGE).transpose(0, 1).reshape(n, -1)
        self.table[1 : n + 1, : PAGES * PAGE] = own.to(self.table.dtype)

    def _prefill(self) -> None:
        """In two chunks that end anywhere; after a hit, in one."""
        hit = torch.zeros_like(self.prefix, dtype=torch.bool)
        hit[self.hits] = True
        begin, cut, end = torch.zeros_like(self.prefix), self.prefix * 2 // 3, self.prefix
        self._extend(torch.where(hit, cut, begin), cut)
        self._extend(torch.where(hit, end, cut), end)
        self._extend(torch.where(hit, PAGE, end), end)

    def _extend(self, start: torch.Tensor, end: torch.Tensor) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        some = torch.nonzero(end > start)[:, 0]
        if not len(some):
            return
        start, count = start[some], (end - start)[some]
        batch, (who, at) = self._batch(ForwardMode.EXTEND, some, start, count, end[some])
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = count.int(), count.tolist()
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = start.int(), start.tolist()
        batch.extend_start_loc = (count.cumsum(0) - count).int()
        batch.extend_num_tokens = int(count.sum())
        self._compress(batch, self.x[who, at])

    def _batch(self, mode, some, start, count, seq_lens):
        """SGLang's batch of a pass, and request and position of each of its rows."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        who = some.repeat_interleave(count)
        at = torch.cat([torch.arange(a, a + c) for a, c in zip(start, count, strict=True)])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(some),
            input_ids=torch.zeros_like(who),
            req_pool_indices=self.requests[some],
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=self.table[who + 1, at].long(),
            positions=at,
        )
        return batch, (who, at)

    def _compress(self, batch, x: torch.Tensor, q: torch.Tensor | None = None):
        """One pass through both compressors and, given its queries, the index.

        Returns what each row may read of the compressed windows, ascending: ``[rows, CHOSEN]``.
        """
        backend = self.runner.attn_backend
        backend.init_forward_metadata(batch)
        core, c4 = backend.forward_metadata.core_metadata, self.layers[C4]
        if q is None:
            backend.forward_indexer_compressor(x, batch, C4, c4.indexer.compressor)
        else:
            core.c4_sparse_page_indices = torch.full((len(x), CHOSEN), -1, dtype=torch.int32)
            core.c4_sparse_raw_indices = torch.full_like(core.c4_sparse_page_indices, -1)
            c4.indexer(x=x, q_lora=q, forward_batch=batch, attn_backend=backend)
        for layer in (C4, C128):
            backend.forward_core_compressor(x, batch, layer, self.layers[layer].compressor)
        if q is not None:
            return core.c4_sparse_raw_indices.sort(dim=1)[0]

    def step(self, start: torch.Tensor, width: int, kept: int | None = None) -> torch.Tensor:
        """A block of ``width`` rows at ``start [requests]``, the first ``kept`` of them right.

        One row without ``kept`` is a decode step. Returns ``[requests, width, CHOSEN]``.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        n = len(self.requests)
        every, count = torch.arange(n), torch.full((n,), width)
        mode = ForwardMode.DECODE if kept is None else ForwardMode.TARGET_VERIFY
        seq_lens = start + 1 if kept is None else start
        batch, (who, at) = self._batch(mode, every, start, count, seq_lens)
        x, q = self.x[who, at], self.q[who, at]
        rejected = at - start[who] >= (kept or width)
        for rows in (x, q):
            rows[rejected] = self.draw(int(rejected.sum()), rows.shape[1])
        return self._compress(batch, x, q).view(n, width, CHOSEN)

    def restore(self) -> None:
        """The state after the prompts."""
        for kind, (rows, pages) in zip(self.kinds, self.before, strict=True):
            kind.rows.copy_(rows)
            kind.pages.copy_(pages)

    def decoded(self) -> Truth:
        """One-row decoding from the prompts on, as far as two blocks may come."""
        chosen, rows, keys = [], [], []
        for step in range(2 * max(WIDTHS)):
            at = self.prefix + step
            chosen.append(self.step(at, 1)[:, 0])
            rows.append([self.pools.ring(k, self.requests, at) for k in self.kinds])
            keys.append([self.pools.keys(k, self.requests, at // k.ratio) for k in self.kinds])
        rows, keys = ([*map(torch.stack, zip(*found, strict=True))] for found in (rows, keys))
        return Truth(rows, keys, torch.stack(chosen))

    def compare(self, length: torch.Tensor, truth: Truth, counts: Counter) -> torch.Tensor:
        """Which requests have a wrong state after ``length`` tokens, ``[requests]`` bool."""
        wrong = torch.zeros(len(self.requests), dtype=torch.bool)
        lengths = length.tolist()
        for i, kind in enumerate(self.kinds):
            r, (rows, pages) = kind.ratio, self.before[i]
            live_rows = [live(n, r) for n in lengths]
            windows = [range(max(0, n // r - LAST), n // r) for n in lengths]
            for what, read, states, ranges, true in (
                ("ring_rows", self.pools.ring, (kind.rows, rows), live_rows, truth.rows),
                ("keys", self.pools.keys, (kind.pages, pages), windows, truth.keys),
            ):
                who, place = _pairs(ranges)
                now, expected = (read(kind, who + 1, place, state) for state in states)
                made_by = place if what == "ring_rows" else (place + 1) * r - 1
                step = made_by - self.prefix[who]
                new = step >= 0  # the others are the prompt's, and as its prefill left them
                expected[new] = true[i][step[new], who[new]]
                differ = (now != expected).any(1)
                counts[what] += len(differ)
                counts[f"wrong_{what}"] += int(differ.sum())
                counts["written"] += int(new.sum())
                wrong[who[differ]] = True
        return wrong


def _pairs(ranges: list[range]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which range, and which of its numbers."""
    pairs = [(i, number) for i, one in enumerate(ranges) for number in one]
    return torch.tensor(pairs, dtype=torch.int64).reshape(len(pairs), 2).unbind(1)


def _compare_choice(ours, theirs, start: torch.Tensor, counts: Counter) -> None:
    """Count equal choices ``[requests, rows, CHOSEN]``, and windows that end in their own block."""
    full = ours[..., 0] >= 0  # where there is something to choose
    counts["selections"] += int(full.sum())
    counts["wrong_selections"] += int((ours != theirs).any(-1).sum())
    own = (ours + 1) * 4 > start[:, None, None]
    counts["chosen_of_their_block"] += int((own & full[..., None]).sum())


def run(worker: Any, prefixes: Sequence[int], fault: Callable | None = None) -> dict[str, Any]:
    """Every width and accepted length for these prompts.

    Args:
        fault: called with the requests and the accepted rows between the two blocks.

    Returns:
        Counts: of ring rows and keys those are ``written`` that come from a block. ``wrong`` are
        the cases with a state that differs, by width.
    """
    counts, wrong_cases = Counter(), Counter()
    for i in range(0, len(prefixes), AT_ONCE):
        _run(worker, prefixes[i : i + AT_ONCE], fault, counts, wrong_cases)
    worker.lanes.activate(worker.block)
    return {**counts, "wrong": wrong_cases}


def _run(worker, prefixes, fault, counts: Counter, wrong_cases: Counter) -> None:
    requests = Requests(worker, prefixes)
    truth = requests.decoded()
    for width in WIDTHS:
        worker.lanes.activate(width)
        for kept in range(1, width + 1):
            requests.restore()
            start, then = requests.prefix, requests.prefix + kept
            chosen = requests.step(start, width, kept)[:, :kept]
            _compare_choice(chosen, truth.chosen[:kept].transpose(0, 1), start, counts)
            if fault is not None and kept < width:
                fault(requests, kept)
            wrong = requests.compare(then, truth, counts)
            chosen = requests.step(then, width, width)
            expected = truth.chosen[kept : kept + width].transpose(0, 1)
            _compare_choice(chosen, expected, then, counts)
            wrong |= requests.compare(then + width, truth, counts)
            counts["cases"] += len(prefixes)
            wrong_cases[width] += int(wrong.sum())


def _rejected_row_written(requests: Requests, kept: int) -> None:
    """The state of the first rejected row, where that of the last accepted one was."""
    for kind in requests.kinds:
        accepted, rejected = (
            requests.pools.where(kind, requests.requests, requests.prefix + at)
            for at in (kept - 1, kept)
        )
        kind.rows[accepted] = kind.rows[rejected]


@torch.no_grad()
def report(worker: Any) -> dict[str, Any]:
    """All cases, and the controls; the pools are empty before and after."""
    every = run(worker, PREFIXES)
    control = run(worker, CONTROL, _rejected_row_written)
    # The planner's cap before SGLang #34189: it kept four rows, whatever the block.
    with mock.patch.object(Rings, "pad", 4):
        capped = run(worker, CONTROL)
    runner = worker.target_worker.model_runner
    runner.token_to_kv_pool_allocator.clear()
    runner.req_to_token_pool.req_to_token.zero_()
    return {"every": every, "rejected row": control, "four rows": capped}


def install() -> None:
    """Write the report when the worker's lanes are built, if the environment asks for it."""
    if PRODUCT not in os.environ:
        return
    from sglang_hyperdflash.serving.worker import HyperDFlashWorker

    build = HyperDFlashWorker.init_cuda_graphs

    def built(self) -> None:
        build(self)
        Path(os.environ[PRODUCT]).write_text(json.dumps(report(self)))

    HyperDFlashWorker.init_cuda_graphs = built
