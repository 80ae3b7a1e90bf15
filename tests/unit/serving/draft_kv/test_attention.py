"""Draft attention and K/V: the backend, its graph buffers, what a pass reads and writes."""

import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

from sglang_hyperdflash.commands.plan_memory import Shape, graph_bytes
from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.draft_kv import attention
from sglang_hyperdflash.serving.draft_kv import draft_kv as kv
from sglang_hyperdflash.serving.draft_kv.window import DraftWindow
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

BATCH, BLOCK, CONTEXT, WINDOW = 256, 7, 1 << 20, 512
HEADS, HEAD_DIM, SPLITS = 32, 128, 8


@pytest.mark.parametrize(
    "target, window, generation, expected",
    [
        ("dsv4", None, "sm90", "fa3"),
        ("dsv4", None, "sm100", "fa4"),
        ("dsv4", None, "another", "triton"),
        ("fa3", None, "sm90", None),  # shared with the target, whose wait it would be
        ("fa3", 512, "sm90", "triton"),  # fa3 reads whole pages
    ],
)
def test_the_default_needs_no_host_lengths(target, window, generation, expected):
    generations = {name: generation == name for name in ("sm90", "sm100")}
    backend = attention.chosen(target, window, DRAFT_ATTENTION_BACKEND_CHOICES, **generations)
    assert (backend and backend[0]) == expected


def test_a_window_is_refused_where_whole_pages_are_read():
    attention.check_window_attention(512, "triton")
    for backend in ("fa3", "trtllm_mha"):
        attention.check_window_attention(None, backend)
        with pytest.raises(HyperDFlashConfigError, match="speculative_draft_attention_backend"):
            attention.check_window_attention(512, backend)


def backend_of(name: str):
    """SGLang's backend as far as its graph buffers need it."""
    if name == "flashinfer":
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend as Kind

        fields = {"num_wrappers": 1, "kv_indptr": [torch.zeros(BATCH + 1)]}
    else:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as Kind

        fields = {"num_head": HEADS, "max_kv_splits": SPLITS, "v_head_dim": HEAD_DIM}
        fields |= {"device": "meta", "sliding_window_size": None, "is_draft_runner": True}
        fields |= {"num_draft_tokens": BLOCK, "swa_v_head_dim": None, "dllm_attention": None}
        # Partial results of a persistent grid: a row of 16 heads for each of 132 multiprocessors.
        fields |= {"lean_total_programs": 132, "lean_block_m": 16}
    made, fields = object.__new__(Kind), fields | {"max_context_len": CONTEXT}
    vars(made).update(fields, skip_prefill=False, use_sliding_window_kv_pool=False)
    return made


def counted(backend: str, widths=(BLOCK,), window=None) -> int:
    sizes = {"requests": BATCH, "context": CONTEXT, "page": 256, "block": BLOCK, "captured": []}
    sizes |= {"heads": HEADS, "head_dim": HEAD_DIM, "splits": SPLITS, "window": window}
    return graph_bytes(Shape(residual=64, vocabulary=1000, widths=widths, **sizes))[backend]


@pytest.mark.parametrize("name, widths", [("flashinfer", [7]), ("triton", [1, 2, 7])])
def test_graph_buffers_hold_a_context_a_request_as_planned(monkeypatch, name, widths):
    """Not one a row of the batch. SGLang's own backends allocate, on the meta device."""
    allocated, zeros = [], torch.zeros

    def meta(*args, **options):
        allocated.append(zeros(*args, **{**options, "device": "meta"}))
        return allocated[-1]

    monkeypatch.setattr(torch, "zeros", meta)
    for width in [width for width in widths if width > 1]:
        backend = backend_of(name)
        allocated_before = len(allocated)
        attention.bound_graph_buffers(backend, BLOCK)
        backend.init_cuda_graph_state(BATCH, BATCH * width)
        assert backend.max_context_len == CONTEXT
        # What a plan of a full context asks for, in the round after a request's last one too.
        assert max(map(len, allocated[allocated_before:])) >= BATCH * (CONTEXT + 3 * BLOCK)
    held = sum(t.numel() * t.element_size() for t in allocated)
    assert held == pytest.approx(counted(name, widths), rel=2e-3)
    # Those of a window of W do not grow with the context: W + 2B and three blocks more.
    assert counted("flashinfer", window=2048) == 4 * BATCH * 2083
    other = SimpleNamespace(init_cuda_graph_state=None)
    attention.bound_graph_buffers(other, BLOCK)
    assert other.init_cuda_graph_state is None, "a backend without such buffers is left alone"


def windowed(needs_host: bool = True, table: torch.Tensor | None = None) -> kv.WindowedDraftKV:
    """A windowed drafter's K/V; ``calls`` of SGLang's writer."""
    own = torch.zeros(4, WINDOW + BLOCK, dtype=torch.int64)
    draft = SimpleNamespace(
        attn_backend=SimpleNamespace(needs_cpu_seq_lens=needs_host),
        model_config=SimpleNamespace(context_len=CONTEXT),
        req_to_token_pool=SimpleNamespace(req_to_token=own),
        kv_index_translator="the drafter's",
    )
    target = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    sizes = {"window": WINDOW, "block": BLOCK, "device": "cpu"}
    runners = SimpleNamespace(draft=draft, target=target, **sizes)
    made = kv.WindowedDraftKV(runners, 0.1)
    sizes = {"tokens": 10000, "ring": 4 * WINDOW, "window": WINDOW, "block": BLOCK, "batch": 4}
    made.window, made.calls = DraftWindow(**sizes, device="cpu"), []
    runners.write_draft_kv = lambda **given: made.calls.append(given)
    return made


def test_a_windows_backend_is_built_for_a_window_and_blocks():
    draft_kv = windowed()
    config = draft_kv.runners.draft.model_config
    with draft_kv.build_context():
        assert config.context_len == WINDOW + 2 * BLOCK
    with kv.DraftKV(draft_kv.runners, 0.1).build_context():
        assert config.context_len == CONTEXT


@pytest.mark.parametrize("needs_host, width", [(True, BLOCK), (False, 2)])
def test_a_windowed_pass_reads_the_devices_own_lengths_and_its_block(needs_host, width):
    """An upper bound is what SGLang gives FlashInfer, which would merge parts never computed."""
    table, planned = torch.arange(6000).view(3, 2000), []
    draft_kv, lengths = windowed(needs_host, table), torch.tensor([300, 900])
    draft_kv.window.enter(table[0, :300].long(), torch.ones(300, dtype=torch.bool))
    batch = SimpleNamespace(req_pool_indices=torch.tensor([0, 1]), seq_lens=lengths)
    plan = SimpleNamespace(reads_from=lambda *given, **rest: planned.append((given, rest)))
    tokens = torch.zeros(2, width, dtype=torch.int64)
    found = draft_kv.context(batch, Block(tokens, tokens, plan, lengths))
    assert found.lengths.tolist() == [300, 0] and found.lengths.dtype == torch.int32
    exact, bound = [300 + width, width], [WINDOW + width] * 2
    assert found.ends_cpu.tolist() == (exact if needs_host else bound)
    assert planned[0][0] == ("the drafter's",) and planned[0][1]["read_extent"] == width
    rows = draft_kv.runners.draft.req_to_token_pool.req_to_token
    blocks = draft_kv.window.scratch_slots(tokens).tolist()
    assert rows[0, : 300 + width].tolist() == [*range(1, 301), *blocks[:width]]
    assert rows[1, :width].tolist() == blocks[width:]
    # After the ring; of four requests at most.
    assert blocks == [4 * WINDOW + 1 + i for i in range(2 * width)]
    assert draft_kv.window.size == 4 * WINDOW + 4 * BLOCK


def test_a_draft_without_a_window_sees_the_whole_context():
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=n)) for n in (20, 30)]
    batch = SimpleNamespace(seq_lens=torch.tensor([5, 9]), reqs=reqs)
    tokens = torch.zeros(2, BLOCK, dtype=torch.int64)
    # Where SGLang knows no host length, what is allocated includes the rows in flight.
    for ends, expected in ((torch.tensor([12, 16]), [12, 16]), (None, [20, 30])):
        context = kv.DraftKV(None, 0.1).context(batch, Block(tokens, tokens, "plan", ends))
        assert context.lengths is batch.seq_lens and context.plan == "plan"
        assert context.ends_cpu.tolist() == expected


def test_a_round_writes_its_committed_rows_and_no_others():
    positions = torch.tensor([[7, 8, 9], [20, 21, 22]])
    plan = SimpleNamespace(write_virtual=torch.arange(100, 106))
    tokens, hidden = torch.zeros(2, 3, dtype=torch.int64), torch.randn(6, 4)
    draft_kv, lengths = windowed(), torch.tensor([2, 1], dtype=torch.int32)
    whole = kv.DraftKV(draft_kv.runners, 0.1)
    whole.runners.draft_slots = lambda plan: plan.write_virtual
    for one in (draft_kv, whole):
        one.write(hidden, Block(tokens, positions, plan, None), lengths)
    for call in draft_kv.calls:
        assert call["target_hidden"] is hidden and call["commit_lens"].tolist() == [2, 1]
        assert call["positions"].tolist() == [7, 8, 9, 20, 21, 22]
    slots = [call["cache_loc_2d"].tolist() for call in draft_kv.calls]
    assert slots == [[[1, 2, 0], [3, 0, 0]], [[100, 101, 102], [103, 104, 105]]]
    assert draft_kv.window.slot_of[100:106].tolist() == [0, 1, -1, 2, -1, -1]


def test_a_prefill_writes_what_a_window_can_reach_and_forgets_the_slots_old_owners():
    draft_kv = windowed()
    draft_kv.window.enter(torch.arange(600), torch.ones(600, dtype=torch.bool))
    request = SimpleNamespace(origin_input_ids=range(600), output_ids=[])
    batch = SimpleNamespace(reqs=[request], prefix_lens=[0], extend_lens=[600])
    plan = SimpleNamespace(write_virtual=torch.arange(600))
    draft_kv.write_prefill(batch, torch.randn(600, 4), plan, torch.arange(600))
    (call,) = draft_kv.calls
    assert call["positions"].tolist() == list(range(88, 600)) and call["cache_loc_2d"] is None
    assert (draft_kv.window.slot_of[:88] == -1).all()
    assert call["cache_loc"].tolist() == list(range(601, 1113))
    # Chunks of 100 of a prompt of 250 with a window of 120; rows follow those of other requests.
    chunks = [kv.entering_rows([0], [100], [250], 120), kv.entering_rows([100], [100], [250], 120)]
    assert chunks == [[], list(range(30, 100))]
    assert kv.entering_rows([0, 300], [100, 10], [1000, 310], 120) == list(range(100, 110))


def test_a_ring_has_what_the_blocks_leave_and_holds_one_window(caplog):
    caplog.set_level(logging.INFO)
    # 100 slots; the blocks of 8 requests take 56. Fewer than a window for each is worth a warning.
    assert kv.ring_size(1000, 0.1, 44, BLOCK, 8) == 44
    with pytest.raises(HyperDFlashConfigError, match="HYPERDFLASH_DRAFT_POOL_RATIO"):
        kv.ring_size(1000, 0.1, 45, BLOCK, 8)
    assert kv.ring_size(1000, 0.1, 40, BLOCK, 1) == 93
    assert [each.levelno for each in caplog.records] == [logging.WARNING, logging.INFO]
