"""Draft attention on a GPU: what is chosen, how large its graph buffers are, how long windows are.

SGLang's own backends allocate, on the meta device: no GPU is needed to count bytes.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

from sglang_hyperdflash.commands.plan_memory import Shape, graph_bytes
from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.draft_kv.attention import (
    bound_graph_buffers,
    check_window_attention,
    chosen,
)
from sglang_hyperdflash.serving.draft_kv.draft_kv import (
    DraftKV,
    WindowedDraftKV,
    entering_rows,
    ring_size,
)
from sglang_hyperdflash.serving.draft_kv.window import DraftWindow
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

BATCH, BLOCK, CONTEXT = 256, 7, 1 << 20
HEADS, HEAD_DIM, SPLITS = 32, 128, 8
GIB = 1 << 30


def counted(backend: str, **changed) -> int:
    """Bytes that are counted of a backend, here of one whole block without any plan."""
    sizes = {"captured": [], "window": None, "widths": [BLOCK]} | changed
    sizes |= {"requests": BATCH, "context": CONTEXT, "page": 256, "block": BLOCK}
    sizes |= {"heads": HEADS, "head_dim": HEAD_DIM, "splits": SPLITS}
    return graph_bytes(Shape(residual=64, vocabulary=1000, **sizes))[backend]


@pytest.mark.parametrize(
    "target, window, generation, expected",
    [
        ("dsv4", None, "sm90", "fa3"),
        ("dsv4", None, "sm100", "fa4"),
        ("dsv4", None, "another", "triton"),
        ("dsv4", 512, "sm90", "triton"),
        # Shared with the target, whose wait it would be.
        ("fa3", None, "sm90", None),
        ("flashinfer", None, "sm90", None),
        # SGLang would share a backend that reads whole pages.
        ("fa3", 512, "sm90", "triton"),
    ],
)
def test_the_default_needs_no_host_lengths(target, window, generation, expected):
    generations = {"sm90": generation == "sm90", "sm100": generation == "sm100"}
    found = chosen(target, window, DRAFT_ATTENTION_BACKEND_CHOICES, **generations)
    assert (found and found[0]) == expected


@pytest.mark.parametrize("backend", ["fa3", "fa4", "trtllm_mha"])
def test_a_window_is_refused_where_whole_pages_are_read(backend):
    check_window_attention(None, backend)
    with pytest.raises(HyperDFlashConfigError, match="reads single K/V slots"):
        check_window_attention(512, backend)


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "torch_reference"])
def test_a_window_may_use_what_reads_slots(backend):
    check_window_attention(512, backend)


def backend_of(name: str, context: int):
    """SGLang's backend as far as its graph buffers need it."""
    if name == "flashinfer":
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend as Kind

        fields = {"num_wrappers": 1, "use_sliding_window_kv_pool": False, "skip_prefill": False}
        fields["kv_indptr"] = [torch.zeros(BATCH + 1)]
    else:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as Kind

        fields = {"num_head": HEADS, "max_kv_splits": SPLITS, "v_head_dim": HEAD_DIM}
        fields |= {"device": "meta", "sliding_window_size": None, "is_draft_runner": True}
        fields |= {"num_draft_tokens": BLOCK, "skip_prefill": False, "swa_v_head_dim": None}
        # Partial results of a persistent grid: a row of 16 heads for each of 132 multiprocessors.
        fields |= {"lean_total_programs": 132, "lean_block_m": 16, "dllm_attention": None}
        fields |= {"use_sliding_window_kv_pool": False}
    made = object.__new__(Kind)
    vars(made).update(fields, max_context_len=context)
    return made


@pytest.fixture
def allocated(monkeypatch) -> list[torch.Tensor]:
    """Everything that ``torch.zeros`` makes from here on, on no device."""
    found: list[torch.Tensor] = []
    zeros = torch.zeros

    def meta(*args, **options):
        found.append(zeros(*args, **{**options, "device": "meta"}))
        return found[-1]

    monkeypatch.setattr(torch, "zeros", meta)
    return found


def gib(tensors: list[torch.Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / GIB


def test_flashinfers_graph_buffers_hold_a_context_a_request(allocated):
    """8.75 GiB of one context a row become 1 GiB; a request's seven rows share their indices."""
    backend_of("flashinfer", CONTEXT).init_cuda_graph_state(BATCH, BATCH * BLOCK)
    assert gib(allocated) == pytest.approx(8.75, rel=0.01)
    allocated.clear()
    backend = backend_of("flashinfer", CONTEXT)
    bound_graph_buffers(backend, BLOCK)
    backend.init_cuda_graph_state(BATCH, BATCH * BLOCK)
    planned = counted("flashinfer") / GIB
    assert gib(allocated) == pytest.approx(planned, rel=1e-4) == pytest.approx(1, rel=0.01)
    indices = backend.cuda_graph_kv_indices[0]
    assert indices.dtype == torch.int32
    # What SGLang's plan of a full context asks for, in the round after a request's last one too.
    assert len(indices) >= BATCH * (CONTEXT + 3 * BLOCK)
    assert backend.max_context_len == CONTEXT


@pytest.mark.parametrize("widths", [[7], [1, 2, 7]])
def test_tritons_graph_buffers_are_indices_and_partial_outputs_of_each_drafting_width(
    allocated, widths
):
    """Found as: 0.22 GiB of a whole block's partial outputs were not counted."""
    drafting = [width for width in widths if width > 1]
    for width in drafting:
        backend = backend_of("triton", CONTEXT)
        bound_graph_buffers(backend, BLOCK)
        backend.init_cuda_graph_state(BATCH, BATCH * width)
    planned = counted("triton", widths=widths) / GIB
    assert gib(allocated) == pytest.approx(planned, rel=2e-3)
    indices = len(drafting) * 8 * BATCH * (CONTEXT + 3 * BLOCK) / GIB
    assert planned - indices == pytest.approx(sum(drafting) / 7 * 0.2205, rel=1e-3)


@pytest.mark.parametrize("deterministic, size", [(False, 384 << 20), (True, 2 << 30)])
def test_flashinfers_workspace_is_counted_once(monkeypatch, deterministic, size):
    """SGLang's own constructor makes it, once a process, and stops here right behind it."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import flashinfer_backend

    made = []

    class Stop(Exception):
        pass

    def buffer(name, make):
        made.append((name, make()))
        raise Stop

    empty = torch.empty
    monkeypatch.delenv("SGLANG_FLASHINFER_WORKSPACE_SIZE", raising=False)
    planned = envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()
    # Restored when the test ends; under deterministic inference the constructor sets its own.
    monkeypatch.setenv("SGLANG_FLASHINFER_WORKSPACE_SIZE", str(planned))
    monkeypatch.setattr(torch, "empty", lambda *a, **o: empty(*a, **{**o, "device": "meta"}))
    monkeypatch.setattr(flashinfer_backend, "get_buffer", buffer)
    settings = mock.MagicMock()
    settings.deterministic.enable_deterministic_inference = deterministic
    for name in ("get_exec", "get_parallel"):
        monkeypatch.setattr(flashinfer_backend, name, lambda: settings)
    for name in ("should_use_tensor_core", "get_int_env_var", "DllmConfig"):
        monkeypatch.setattr(flashinfer_backend, name, mock.MagicMock())
    runner = mock.MagicMock(sliding_window_size=None)
    runner.model_config.is_encoder_decoder = False
    runner.model_config.hf_config.architectures = []
    with pytest.raises(Stop):
        flashinfer_backend.FlashInferAttnBackend(runner)
    assert [(name, t.numel() * t.element_size()) for name, t in made] == [
        ("flashinfer_workspace", size)
    ]
    if not deterministic:
        assert planned == size
    for widths in ([7], [2, 7]):
        none = counted("flashinfer", widths=widths)
        assert counted("flashinfer", widths=widths, workspace=size) == none + size


def test_flashinfer_has_a_plan_of_its_own_for_every_captured_batch(monkeypatch):
    """Eight MiB each: FlashInfer's own wrapper allocates, on the meta device."""
    found, empty = [], torch.empty

    def meta(*size, **options):
        options.pop("pin_memory", None)
        if options.get("device") == "cpu":  # the host's copy of a plan
            return empty(*size, **options)
        found.append(empty(*size, **{**options, "device": "meta"}))
        return found[-1]

    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def given(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device="meta")

    workspace = torch.zeros(16, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(torch, "empty", meta)
    BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        qo_indptr_buf=given(5),
        paged_kv_indptr_buf=given(5),
        paged_kv_indices_buf=given(100),
        paged_kv_last_page_len_buf=given(4),
    )
    monkeypatch.undo()
    none, one = (counted("flashinfer", captured=sizes) for sizes in ([], [4]))
    held = sum(t.numel() * t.element_size() for t in found)
    assert one - none == pytest.approx(held, rel=1e-3)


def test_a_windows_graph_buffers_do_not_grow_with_the_context():
    # W + 2B and three blocks more.
    assert counted("flashinfer", window=2048) == 4 * 256 * 2083
    partial = 4 * 256 * 7 * HEADS * SPLITS * (HEAD_DIM + 1)
    assert counted("triton", window=2048) == 8 * 256 * 2083 + partial
    with pytest.raises(KeyError):
        counted("fa3", window=2048)


def test_a_backend_without_such_buffers_is_left_alone():
    backend = SimpleNamespace(init_cuda_graph_state=None)
    bound_graph_buffers(backend, BLOCK)
    assert backend.init_cuda_graph_state is None


def ring(window: int = 512) -> DraftWindow:
    return DraftWindow(
        tokens=10000, ring=4 * window, window=window, block=BLOCK, batch=4, device="cpu"
    )


def windowed(needs_host: bool = True, table: torch.Tensor | None = None) -> WindowedDraftKV:
    """A windowed drafter's K/V, of a window of 512."""
    backend = SimpleNamespace(needs_cpu_seq_lens=needs_host)
    own = torch.zeros(4, 512 + BLOCK, dtype=torch.int64)
    draft = SimpleNamespace(
        attn_backend=backend,
        model_config=SimpleNamespace(context_len=CONTEXT),
        req_to_token_pool=SimpleNamespace(req_to_token=own),
        kv_index_translator="the drafter's",
    )
    target = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    found = WindowedDraftKV(
        SimpleNamespace(
            draft_model_runner=draft,
            model_runner=target,
            draft_window_size=512,
            block=BLOCK,
            device="cpu",
        )
    )
    found.window = ring()
    return found


def test_a_windows_backend_is_built_for_a_window_and_blocks():
    draft_kv = windowed()
    config = draft_kv.worker.draft_model_runner.model_config
    with draft_kv.build_context():
        assert config.context_len == 512 + 2 * BLOCK
    assert config.context_len == CONTEXT
    with DraftKV(draft_kv.worker).build_context():
        assert config.context_len == CONTEXT


@pytest.mark.parametrize("width", [BLOCK, 2])
@pytest.mark.parametrize("needs_host", [True, False])
def test_flashinfer_is_given_the_devices_own_lengths_of_a_window(needs_host, width):
    """An upper bound is what SGLang gives it; FlashInfer would merge parts never computed."""
    table = torch.arange(6000).view(3, 2000)
    draft_kv = windowed(needs_host, table)
    draft_kv.window.enter(table[0, :300].long(), torch.ones(300, dtype=torch.bool))
    lengths = torch.tensor([300, 900])
    batch = SimpleNamespace(req_pool_indices=torch.tensor([0, 1]), seq_lens=lengths)
    planned = []
    plan = SimpleNamespace(reads_from=lambda *given, **rest: planned.append((given, rest)))
    tokens = torch.zeros(2, width, dtype=torch.int64)
    found = draft_kv.context(batch, Block(tokens, tokens, plan, lengths))
    assert found.lengths.tolist() == [300, 0] and found.lengths.dtype == torch.int32
    exact, bound = [300 + width, width], [512 + width] * 2
    assert found.ends_cpu.tolist() == (exact if needs_host else bound)
    assert planned[0][0] == ("the drafter's",)
    assert planned[0][1]["read_extent"] == width
    own = draft_kv.worker.draft_model_runner.req_to_token_pool.req_to_token
    blocks = draft_kv.window.block_slots(tokens).view(2, width)
    assert torch.equal(own[0, 300 : 300 + width], blocks[0])
    assert torch.equal(own[1, :width], blocks[1])


def test_a_draft_without_a_window_sees_the_whole_context():
    batch = SimpleNamespace(seq_lens=torch.tensor([5, 9]), reqs=None)
    tokens, ends = torch.zeros(2, BLOCK, dtype=torch.int64), torch.tensor([12, 16])
    found = DraftKV(None).context(batch, Block(tokens, tokens, "plan", ends))
    assert found.lengths is batch.seq_lens and found.plan == "plan"
    assert found.ends_cpu.tolist() == [12, 16]
    # SGLang knows no host length: what is allocated includes the rows in flight.
    batch.reqs = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=n)) for n in (20, 30)]
    found = DraftKV(None).context(batch, Block(tokens, tokens, "plan", None))
    assert found.ends_cpu.tolist() == [20, 30]


def written(draft_kv: DraftKV) -> list[dict]:
    """What goes to SGLang's writer from now on."""
    calls: list[dict] = []
    draft_kv.worker._append_target_hidden_to_draft_kv_by_loc = lambda **given: calls.append(given)
    return calls


def test_a_round_writes_its_committed_rows_into_the_window():
    draft_kv = windowed()
    calls = written(draft_kv)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    positions = torch.tensor([[7, 8, 9], [20, 21, 22]])
    plan = SimpleNamespace(write_virtual=torch.arange(100, 106))
    block, hidden = Block(tokens, positions, plan, None), torch.randn(6, 4)
    draft_kv.write(hidden, block, torch.tensor([2, 1], dtype=torch.int32))
    (call,) = calls
    assert call["target_hidden"] is hidden and call["commit_lens"].tolist() == [2, 1]
    assert call["cache_loc_2d"].tolist() == [[1, 2, 0], [3, 0, 0]]
    assert call["positions"].tolist() == [7, 8, 9, 20, 21, 22]
    assert draft_kv.window.slot_of[100:106].tolist() == [0, 1, -1, 2, -1, -1]


def test_a_prefill_writes_what_a_window_can_reach_and_forgets_the_slots_old_owners():
    draft_kv = windowed()
    calls = written(draft_kv)
    draft_kv.window.enter(torch.arange(600), torch.ones(600, dtype=torch.bool))
    request = SimpleNamespace(origin_input_ids=range(600), output_ids=[])
    batch = SimpleNamespace(reqs=[request], prefix_lens=[0], extend_lens=[600])
    plan = SimpleNamespace(write_virtual=torch.arange(600))
    draft_kv.write_prefill(batch, torch.randn(600, 4), plan, torch.arange(600))
    (call,) = calls
    assert call["positions"].tolist() == list(range(88, 600)) and call["cache_loc_2d"] is None
    assert (draft_kv.window.slot_of[:88] == -1).all()
    assert call["cache_loc"].tolist() == list(range(601, 1113))


def test_a_round_copies_nothing_from_the_host(monkeypatch):
    """Every constant of a round is made once: a new tensor would be a blocking copy."""
    window, table = ring(16), torch.zeros(4, 16 + 2 * BLOCK, dtype=torch.int64)
    target = torch.arange(400).view(4, 100)
    rows, lengths = torch.arange(4), torch.full((4,), 50)
    for name in ("tensor", "as_tensor", "arange"):
        monkeypatch.setattr(torch, name, None)
    monkeypatch.setattr(torch.Tensor, "new_tensor", None)
    window.enter(target[:, :50].reshape(-1), torch.ones(200).bool())
    slots, visible = window.view(target, rows, lengths)
    window.write_table(table, rows, slots, visible, BLOCK)
    assert window.block_slots(torch.empty(4, BLOCK)).numel() == 4 * BLOCK


def test_only_rows_that_the_first_block_can_reach_enter():
    """Chunks of 100 of a prompt of 250 with a window of 120; a request that is whole beside it."""
    chunks = [entering_rows([at], [n], [250], 120) for at, n in ((0, 100), (100, 100), (200, 50))]
    assert chunks == [[], list(range(30, 100)), list(range(50))]
    assert sum(map(len, chunks)) == 120
    # Its rows follow those of the first request.
    assert entering_rows([0, 300], [100, 10], [1000, 310], 120) == list(range(100, 110))
    assert entering_rows([0], [300], [300], 120) == list(range(180, 300))


def test_a_ring_has_what_the_blocks_leave_and_holds_one_window(monkeypatch):
    monkeypatch.setenv("HYPERDFLASH_DRAFT_POOL_RATIO", "0.1")
    # 100 slots; the blocks of 8 requests take 56.
    assert ring_size(1000, 44, BLOCK, 8) == 44
    with pytest.raises(HyperDFlashConfigError, match="has 44 left for windows of 45 tokens"):
        ring_size(1000, 45, BLOCK, 8)


@pytest.mark.parametrize("slots, level", [(4 * 512, logging.INFO), (3 * 512, logging.WARNING)])
def test_a_ring_that_is_too_small_for_every_window_says_so(monkeypatch, caplog, slots, level):
    monkeypatch.setenv("HYPERDFLASH_DRAFT_POOL_RATIO", "0.5")
    with caplog.at_level(logging.INFO):
        assert ring_size(2 * (slots + 4 * BLOCK), 512, BLOCK, 4) == slots
    assert [record.levelno for record in caplog.records] == [level]
    assert f"{slots / 2048:.2f} of 4 requests x 512 tokens" in caplog.text
