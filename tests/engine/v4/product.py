"""Every verify width, every offset of the compress ratios, every accepted length, module by module.

Runs inside a server before it serves, with SGLang's own modules, metadata, planner and pools. Only
the kernels that use the planner's plans (``compressor.py``), and the index's scores and top-k
(``sparse.py``), are torch's.

Hidden states are drawn, other ones for every request and position, so a state in a wrong place is a
wrong state. A case is a request whose prompt came in chunks, or is in part another's (a radix hit),
a block of which some rows are right, and a second block that finds what the first one left.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.engine.v4 import planner
from tests.engine.v4.latents import KEY, LATENT, page_bytes

PRODUCT = "V4_PRODUCT"  # a file for the JSON report
WIDTHS = range(2, 11)
# Every offset of both ratios; first windows, the ends of a page and of a window of 128.
PREFIXES = (*range(1, 9), *range(385, 513))
AT_ONCE = 34
CONTROL = range(385, 393)
PAGE, PAGES = 256, 3
C4, C128 = 1, 2  # layers of the checkpoint, one of each ratio
WINDOW = {4: 8, 128: 128}  # tokens that one compressed row reads
# The index chooses 512 of more than 2048 tokens' windows; here 64 of these requests' 96 to 133.
CHOSEN = 64
LAST = 16  # compressed keys that are compared, those before the block among them


@dataclass(frozen=True)
class Kind:
    """One compressor of one layer: SGLang's ring of its rows and the pages of its keys."""

    ring: Any
    pages: torch.Tensor
    layout: tuple[int, int, int]

    @property
    def rows(self) -> torch.Tensor:
        """All rings, ``[rows, width]`` fp32."""
        return self.ring.kv_score_buffer.kv_score


class Requests:
    """Requests of given prompt lengths, with pages, drawn hidden states and SGLang's pools."""

    def __init__(self, worker: Any, prefixes: tuple[int, ...]) -> None:
        self.runner, n = worker.target_worker.model_runner, len(prefixes)
        self.table = self.runner.req_to_token_pool.req_to_token
        self.pool = pool = self.runner.token_to_kv_pool
        rings, index = pool.compress_state_pools, pool.indexer_compress_state_pools[C4]
        self.kinds = [Kind(rings[i], pool.get_extra_key_buffer(i), LATENT) for i in (C4, C128)]
        self.kinds.append(Kind(index, pool.get_index_k_with_scale_buffer(C4), KEY))
        self.layers = [layer.self_attn for layer in self.runner.model.model.layers]
        self.requests, self.prefix = torch.arange(1, n + 1), torch.tensor(prefixes)
        self._allocate(n)
        config = self.runner.model_config.hf_text_config
        draw = torch.Generator().manual_seed(sum(prefixes))
        self.draw = lambda *shape: torch.randn(*shape, generator=draw).bfloat16()
        self.x, self.q = (
            self.draw(n, PAGE * PAGES, width) for width in (config.hidden_size, config.q_lora_rank)
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

    def _allocate(self, n: int) -> None:
        """Pages of several requests between each other, and other ones for sliding windows."""
        allocator = self.runner.token_to_kv_pool_allocator
        allocator.clear()
        slots, windows = (
            one.alloc(n * PAGES * PAGE).view(-1, PAGE)
            for one in (allocator.full_attn_allocator, allocator.swa_attn_allocator)
        )
        allocator.set_full_to_swa_mapping(slots.flatten(), windows.flip(0).flatten())
        pages = slots.view(PAGES, n, PAGE).transpose(0, 1).reshape(n, -1)
        self.table[1 : n + 1, : PAGES * PAGE] = pages.to(self.table.dtype)

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
        batch, rows = self._batch(ForwardMode.EXTEND, some, start, count, end[some])
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = count.int(), count.tolist()
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = start.int(), start.tolist()
        batch.extend_start_loc = (count.cumsum(0) - count).int()
        batch.extend_num_tokens = int(count.sum())
        self._compress(batch, self.x[rows])

    def _batch(self, mode, some, start, count, seq_lens):
        """SGLang's batch of a pass, and request and position of each of its rows."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        who = some.repeat_interleave(count)
        place = torch.cat([torch.arange(a, a + c) for a, c in zip(start, count, strict=True)])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(some),
            input_ids=torch.zeros_like(who),
            req_pool_indices=self.requests[some],
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=self.table[who + 1, place].long(),
            positions=place,
        )
        return batch, (who, place)

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
        mode = ForwardMode.DECODE if kept is None else ForwardMode.TARGET_VERIFY
        sizes = (torch.full((n,), width), start + 1 if kept is None else start)
        batch, (who, place) = self._batch(mode, torch.arange(n), start, *sizes)
        x, q = self.x[who, place], self.q[who, place]
        rejected = place - start[who] >= (kept or width)
        for rows in (x, q):
            rows[rejected] = self.draw(int(rejected.sum()), rows.shape[1])
        return self._compress(batch, x, q).view(n, width, CHOSEN)

    def restore(self) -> None:
        """The state after the prompts."""
        for kind, (rows, pages) in zip(self.kinds, self.before, strict=True):
            kind.rows.copy_(rows)
            kind.pages.copy_(pages)

    def where(self, kind: Kind, position: torch.Tensor) -> torch.Tensor:
        """Ring rows of ``position [requests, n]``; int64."""
        request = self.requests[:, None].expand_as(position)
        if kind.ring.request_scoped:
            return kind.ring.translate_from_req_position_to_state_loc(request, position)
        slot = self.pool.full_to_swa_index_mapping[self.table[request, position].long()]
        return kind.ring.translate_from_swa_loc_to_state_loc(slot)

    def keys(self, kind: Kind, window: torch.Tensor) -> torch.Tensor:
        """The stored bytes of the keys of ``window [requests, n]``."""
        pages = kind.pages.view(torch.uint8).view(len(kind.pages), -1)
        ratio = kind.ring.ratio
        slot = self.table[self.requests[:, None], window * ratio].long() // ratio
        return pages[page_bytes(slot, self.pool.page_size // ratio, *kind.layout)]

    def state(self, length: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """What tokens after ``length [requests]`` may read, of each kind.

        Ring rows: those of a compression still to come, which ends with the first multiple of the
        ratio after ``length``. Keys: the last ones. Zero where there is none.
        """
        state = {"ring_rows": [], "keys": []}
        for kind in self.kinds:
            ratio, window = kind.ring.ratio, WINDOW[kind.ring.ratio]
            done = (length // ratio)[:, None]
            place = length[:, None] - 1 - torch.arange(window)
            read = place >= ((done + 1) * ratio - window).clamp_min(0)
            rows = kind.rows[self.where(kind, place.clamp_min(0))].view(torch.int32)
            state["ring_rows"].append(rows * read[..., None])
            last = done - 1 - torch.arange(LAST)
            keys = self.keys(kind, last.clamp_min(0))
            state["keys"].append(keys * (last >= 0)[..., None])
        return state


def run(worker: Any, prefixes: Sequence[int], fault: Callable | None = None) -> dict[str, Any]:
    """Every width and accepted length for these prompts, against one-row decoding.

    Args:
        fault: called with the requests and the accepted rows between the two blocks.

    Returns:
        How many ``cases`` there were; in how many of them after a block ``ring_rows`` and ``keys``
        are wrong, and how many ``selections``; ``wrong``: cases with a wrong state, by width.
    """
    counts, wrong_cases = Counter(), Counter()
    for i in range(0, len(prefixes), AT_ONCE):
        _run(worker, prefixes[i : i + AT_ONCE], fault, counts, wrong_cases)
    worker.lanes.activate(worker.block)
    return {**counts, "wrong": wrong_cases}


def _run(worker, prefixes, fault, counts: Counter, wrong_cases: Counter) -> None:
    requests = Requests(worker, prefixes)
    chosen, truth = [], []
    for step in range(2 * max(WIDTHS)):
        chosen.append(requests.step(requests.prefix + step, 1)[:, 0])
        truth.append(requests.state(requests.prefix + step + 1))
    chosen = torch.stack(chosen, dim=1)

    def compare(ours: torch.Tensor, begin: int) -> torch.Tensor:
        """Choices of rows from ``begin`` on; returns which requests' state after them is wrong."""
        end, wrong = begin + ours.shape[1], torch.zeros(len(prefixes), dtype=torch.bool)
        counts["selections"] += int((ours != chosen[:, begin:end]).any(-1).sum())
        state = requests.state(requests.prefix + end)
        for what, kinds in state.items():
            both = zip(kinds, truth[end - 1][what], strict=True)
            differ = torch.stack([(now != then).flatten(1).any(1) for now, then in both]).any(0)
            counts[what] += int(differ.sum())
            wrong |= differ
        return wrong

    for width in WIDTHS:
        worker.lanes.activate(width)
        for kept in range(1, width + 1):
            requests.restore()
            first = requests.step(requests.prefix, width, kept)[:, :kept]
            if fault is not None and kept < width:
                fault(requests, kept)
            wrong = compare(first, 0)
            wrong |= compare(requests.step(requests.prefix + kept, width, width), kept)
            counts["cases"] += len(prefixes)
            wrong_cases[width] += int(wrong.sum())


def _rejected_row_written(requests: Requests, kept: int) -> None:
    """The state of the first rejected row, where that of the last accepted one was."""
    for kind in requests.kinds:
        last = requests.prefix[:, None] + kept
        kind.rows[requests.where(kind, last - 1)] = kind.rows[requests.where(kind, last)]


@torch.no_grad()
def report(worker: Any) -> dict[str, Any]:
    """All cases, and the controls; the pools are empty before and after."""
    every = run(worker, PREFIXES)
    control = run(worker, CONTROL, _rejected_row_written)
    # The planner's cap before SGLang #34189: it kept four rows, whatever the block.
    with mock.patch.object(planner, "KEPT", 4):
        capped = run(worker, CONTROL)
    runner = worker.target_worker.model_runner
    runner.token_to_kv_pool_allocator.clear()
    runner.req_to_token_pool.req_to_token.zero_()
    return {"every": every, "rejected row": control, "four rows": capped}


def write_report(result, worker) -> None:
    Path(os.environ[PRODUCT]).write_text(json.dumps(report(worker)))


def install() -> None:
    """Write the report when the worker's lanes are built, if the environment asks for it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if PRODUCT in os.environ:
        built = "sglang_hyperdflash.serving.worker.HyperDFlashWorker.init_cuda_graphs"
        HookRegistry.register(built, write_report, HookType.AFTER)
