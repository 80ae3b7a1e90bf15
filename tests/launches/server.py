"""A server of DeepSeek-V4-Flash's sizes with everything of ours, and stubs where models would run.

:meth:`FakeServer.round` is ``HyperDFlashWorker.decode`` itself. What it calls of ours, of SGLang's
worker, its plan of K/V slots and its groups runs on fake tensors; the passes of the target and of
the drafter give tensors of their sizes, and FlashInfer's filters count what their sources launch.
"""

from collections import deque
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.serving import worker as worker_module
from sglang_hyperdflash.serving.batch import RequestState
from sglang_hyperdflash.serving.draft_kv.draft_kv import DraftKV, WindowedDraftKV
from sglang_hyperdflash.serving.draft_kv.window import DraftWindow
from sglang_hyperdflash.serving.drafting.copies import CopyHistory
from sglang_hyperdflash.serving.drafting.draft_step import DraftStep
from sglang_hyperdflash.serving.record.recorder import Recorder, Recording
from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.serving.verification.prefill import PrefillSampler
from sglang_hyperdflash.serving.verification.verifier import Verifier
from sglang_hyperdflash.serving.width.lanes import Lane
from sglang_hyperdflash.serving.worker import HyperDFlashWorker
from tests.launches.counter import Counter, FakeCuda

VOCABULARY, WIDTH, PATHS, CANDIDATES, RANK, BLOCK = 129_280, 4096, 4, 64, 256, 7
COPY_LENGTH = 32_768
WINDOW, CONTEXT, SLOTS, TOKENS = 1024, 65_536, 512, 1 << 20
DEVICE, BF16, I64, I32 = "cuda", torch.bfloat16, torch.int64, torch.int32
# Phases of a round, besides those before and after it.
ROUND = ("drafting", "logits", "verification", "commit")
# Streams and events of a device: what is done in them is counted.
STREAMS = SimpleNamespace(
    Stream=mock.MagicMock,
    Event=mock.MagicMock,
    current_stream=lambda: None,
    stream=lambda stream: nullcontext(),
)
SETTINGS = SimpleNamespace(
    kernel=SimpleNamespace(sampling_backend="flashinfer"),
    deterministic=SimpleNamespace(enable_deterministic_inference=False),
)
GREEDY = {"top_k": 1, "stop_token_ids": [7]}


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


class Request:
    eos_token_ids, vocab_size, tokenizer, retraction_count = (1, 2), VOCABULARY, None, 0
    origin_input_ids, output_ids = [0] * 100, [0] * 20

    def __init__(self, number: int, parameters: dict[str, Any]) -> None:
        self.rid, self.kv = str(number), SimpleNamespace(req_pool_idx=number, kv_committed_len=120)
        self.sampling_params = SamplingParams(**GREEDY | parameters)


class Worker(HyperDFlashWorker):
    """The served worker around a target and a drafter that only have sizes."""

    target_worker = model_runner = draft_model_runner = draft_model = draft_worker = recorder = None

    def __init__(self, server: Any) -> None:
        def broadcast(values: torch.Tensor, src: int) -> None:
            assert values.is_cuda and values.is_contiguous()  # or NCCL refuses it
            server.counter.launch("broadcast", values.nbytes)

        group = SimpleNamespace(rank_in_group=0, world_size=server.ranks, broadcast=broadcast)
        self.device, self.block, self.rounds = DEVICE, BLOCK, deque()
        self.block_size, self.page_size, self.gpu_id = BLOCK, 1, 0
        self.draft_window_size = WINDOW if server.window else None
        self.draft_parallel_layout = SimpleNamespace(tp_group=None)
        self._mask_token_id, self._full_embed_gpu, self.lilicorr = 128_815, None, None
        self._use_fused_kv_materialize, self._fused_kv_helper = True, object()
        self._tp_sync, self._target_logits_processor = SpecTpSync(group), server.logits_processor
        self._choose_width, self._kinds = lambda requests, classes: server.width, {}
        self._can_skip_verify_logits = lambda batch, info: True
        self._append_target_hidden_fused = lambda *given, **others: None  # SGLang's, not ours


@dataclass
class FakeServer:
    """One batch of equal or alternating requests on one server."""

    cuda: FakeCuda
    bs: int
    requests: tuple[dict[str, Any], ...]  # of each in turn, parameters of ``SamplingParams``
    width: int = BLOCK  # rows of a block
    head: bool = True  # the drafter has a dependency head
    window: bool = False
    ranks: int = 1
    sharded: bool = False  # logits stay in their vocabulary shards
    graph: bool = True  # the draft's CUDA graph holds the candidates
    recorded: bool = False  # one request in 20 is
    copied: bool = True  # drafts may be copies

    def __post_init__(self) -> None:
        self.logits_processor = SimpleNamespace(
            is_deferred_shard=lambda logits: self.sharded,
            deferred_argmax=lambda logits: logits.new_zeros(len(logits), dtype=I64),
            finish_deferred_gather=lambda logits: logits,
        )
        with self.patched():
            self._build()
            self._fill()
            if self.recorded:
                self._record()

    def patched(self) -> ExitStack:
        """SGLang's settings and functions of CUDA, while the server is built and runs."""
        alone = SimpleNamespace(attn_dp_enabled=False, tp_size=1, attn_dcp_size=1)
        speculative, ours = "sglang.kernels.ops.speculative", "sglang_hyperdflash.serving"
        verify_input = "sglang.srt.speculative.dflash_info.DFlashVerifyInput"
        stack, copying = ExitStack(), ("batch", "draft_kv.draft_kv", "drafting.copies")
        for place, value in {
            f"{speculative}.cache_locs._is_cuda": True,
            f"{verify_input}.prepare_for_verify": lambda *given, **k: (None, None),
            f"{ours}.batch.get_exec": lambda: SETTINGS,
            f"{ours}.verification.verifier.get_parallel": lambda: alone,
            f"{ours}.drafting.draft_step.enable_num_token_non_padded": lambda: False,
            f"{ours}.drafting.candidates.candidate_topk": lambda *given, **k: (*self.candidates, 0),
            **{f"{ours}.{module}.async_h2d": self._async_h2d for module in copying},
            f"{ours}.drafting.copies.async_d2h": self._async_d2h,
        }.items():
            stack.enter_context(mock.patch(place, value))
        return stack

    def _async_h2d(self, values: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """SGLang's: the host's values, through pinned memory."""
        result = torch.empty(torch.tensor(values).shape, dtype=dtype, device=device)
        self.counter.launch("async_h2d", result.nbytes)
        return result

    def _async_d2h(self, values: torch.Tensor) -> torch.Tensor:
        self.counter.launch("async_d2h", values.nbytes)
        return torch.empty(values.shape, dtype=values.dtype)

    def _build(self) -> None:
        worker = self.worker = Worker(self)
        table = new(SLOTS, CONTEXT, dtype=I32)
        embedding = new(VOCABULARY, WIDTH, dtype=BF16)
        target = self._runner(table, None)
        target.model = SimpleNamespace(
            lm_head=SimpleNamespace(
                weight=torch.empty(1, dtype=BF16),
                shard_indices=SimpleNamespace(num_org_elements=VOCABULARY),
            ),
            get_input_embeddings=lambda: lambda ids: torch.nn.functional.embedding(ids, embedding),
        )
        target.model_config = SimpleNamespace(vocab_size=VOCABULARY, context_len=CONTEXT)
        worker.model_runner = target
        worker.target_worker = SimpleNamespace(
            model_runner=target, forward_batch_generation=self._target_pass
        )
        draft_table = new(SLOTS, WINDOW + BLOCK, dtype=I32) if self.window else table
        worker.draft_model_runner = self._runner(draft_table, self._draft_pass)
        worker.draft_model = self._drafter()
        worker.draft_worker = SimpleNamespace(alloc_memory_pool=None)
        worker.request_state = RequestState(target, 0, DEVICE)
        worker.runners = runners = Runners.of(worker)
        worker.draft_step, worker.verifier = DraftStep(runners, 0.5), Verifier(runners)
        worker.verifier.renorm = self._top_k, self._top_p
        worker.history, worker.metrics = None, None
        worker.width_control = SimpleNamespace(best=BLOCK, policy=object())
        if self.copied:
            worker.history = CopyHistory(SLOTS, COPY_LENGTH, BLOCK, VOCABULARY, DEVICE)
            worker.draft_step.copies = worker.history.copies
            worker.request_state.history = worker.history
        worker.draft_kv = (WindowedDraftKV if self.window else DraftKV)(runners, 0.1)
        if self.window:
            sizes = {"tokens": TOKENS, "ring": TOKENS // 4, "window": WINDOW, "block": BLOCK}
            worker.draft_kv.window = DraftWindow(**sizes, batch=256, device=DEVICE)
            spaces = worker.draft_model_runner.kv_index_translator._spaces
            slots = worker.draft_kv.window.scratch_slots
            spaces[IdSpaceKind.FULL] = IdSpace(key="window", write=slots)
        # Sums over many rounds begin before any of them is counted.
        buffers = worker.draft_step.buffers(self.width, self.bs) if self.width > 1 else None
        self.lane = Lane(self.width, None, buffers if self.graph else None)
        worker.lanes = SimpleNamespace(activate=lambda width: self.lane)

    def _runner(self, table: torch.Tensor, forward: Any) -> SimpleNamespace:
        pools = dict.fromkeys(("token_to_kv_pool_allocator", "token_to_kv_pool"))
        return SimpleNamespace(
            device=DEVICE,
            kv_index_translator=KVIndexTranslator(
                req_to_token=table, page_size=1, device=DEVICE, **pools
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=False),
            forward=forward,
        )

    def _drafter(self) -> SimpleNamespace:
        """A drafter's modules that a round runs outside its layers; bf16, the gates fp32."""
        with torch.device(DEVICE):
            dependency = DependencyHead(VOCABULARY, WIDTH, RANK, "residual")
            reducer = HCGateReducer(PATHS, WIDTH, rms_eps=1e-6, hc_eps=1e-6)
        for parameter in dependency.parameters():
            parameter.data = parameter.data.to(BF16)
        norm = new(WIDTH, dtype=BF16)
        return SimpleNamespace(
            dependency=dependency if self.head else None,
            hyperdflash_config=SimpleNamespace(candidates=CANDIDATES),
            project_target_hidden=lambda hidden: reducer(hidden, norm),
        )

    def _record(self) -> None:
        empty = torch.empty
        with (
            # Memory is not pinned: that takes a real device.
            mock.patch.object(torch, "empty", lambda *n, pin_memory, dtype: empty(*n, dtype=dtype)),
            mock.patch.object(torch, "get_device_module", lambda device: STREAMS),
        ):
            self.worker.recorder = Recorder(None, 2 * 4096, PATHS * WIDTH, BF16, DEVICE)
        for req in self.batch.reqs[::20]:
            req.hyperdflash_recording = Recording(0, 4096, 0)

    def _fill(self) -> None:
        """The batch, and what the passes of both models leave."""
        bs, rows = self.bs, self.bs * self.width
        reqs = [Request(i, self.requests[i % len(self.requests)]) for i in range(bs)]
        asked = [req.sampling_params for req in reqs]
        info = SamplingBatchInfo(
            temperatures=new(bs, 1),
            top_ps=new(bs),
            top_ks=new(bs, dtype=I32),
            min_ps=new(bs),
            is_all_greedy=False,
            is_any_greedy=True,
            need_top_p_sampling=any(p.top_p < 1.0 for p in asked),
            need_top_k_sampling=any(1 < p.top_k < TOP_K_ALL for p in asked),
            need_min_p_sampling=any(p.min_p > 0.0 for p in asked),
            vocab_size=VOCABULARY,
            logit_bias=new(bs, VOCABULARY) if any(p.logit_bias for p in asked) else None,
        )
        lengths, host_lengths = new(bs, dtype=I64), torch.empty(bs, dtype=I64)
        lengths.record_stream = lambda stream: None
        anchors = {"bonus_tokens": new(bs, dtype=I64), "nxt_kv_lens_cpu": host_lengths}
        self.batch = ScheduleBatch(
            reqs,
            sampling_info=info,
            forward_mode=ForwardMode.DECODE,
            can_run_decode_cuda_graph=True,
            req_pool_indices=new(bs, dtype=I64),
            seq_lens=lengths,
            seq_lens_cpu=host_lengths,
            seq_lens_sum=0,
            spec_info=SimpleNamespace(**anchors),
        )
        self.hidden, self.logits = new(rows, WIDTH, dtype=BF16), new(rows, VOCABULARY)
        self.residual = new(rows, PATHS * WIDTH, dtype=BF16)
        self.candidates = new(rows - bs, CANDIDATES, dtype=I64), new(rows - bs, CANDIDATES)

    def _top_k(self, probs: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """FlashInfer's ``topk.cuh``: rows are read into shared memory, and once more, scaled."""
        self.counter.launch("top_k_renorm_probs", 3 * probs.nbytes + limits.nbytes)
        return torch.empty_like(probs)

    def _top_p(self, probs: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Its ``air_top_p.cuh``: counters; a pass for each 11 bits; the rows again."""
        self.counter.launch("top_p_renorm_probs", 4 * probs.nbytes + limits.nbytes, 5)
        return torch.empty_like(probs)

    def _draft_pass(self, forward_batch: Any) -> SimpleNamespace:
        """The drafter's pass; a graph's replay writes the candidates, too."""
        if self.graph:
            with self.counter.during("draft graph"):
                self.lane.draft_buffers(self.hidden, forward_batch.input_ids)
        output = LogitsProcessorOutput(None, hidden_states=self.hidden)
        return SimpleNamespace(can_run_graph=self.graph, logits_output=output)

    def _target_pass(self, **given: Any) -> GenerationBatchResult:
        output = LogitsProcessorOutput(self.logits, hidden_states=self.residual)
        return GenerationBatchResult(output, can_run_cuda_graph=True)

    def round(self) -> Counter:
        """One round of a new batch, and what its prefill has done before."""
        worker, state = self.worker, self.worker.request_state
        with self.patched() as stack:
            assert state.counts.table.is_cuda  # made once, for the first request with penalties
            counter = self.counter = stack.enter_context(self.cuda.count("new batch"))
            state.begin(self.batch)
            places = [
                (worker_module, "prepare_block", "block"),
                (worker.draft_kv, "context", "window"),
                (worker.draft_step, "draft", "drafting"),
                (worker.draft_step, "_forward", "draft input"),
                (worker.verifier, "finish_logits", "logits"),
                (worker.verifier, "accept", "verification"),
                (worker.draft_kv, "write", "draft K/V"),
                (state, "count", "counting"),
            ]
            if worker.history is not None:
                places += [
                    (worker.history, "begin", "copies of a new batch"),
                    (worker.history, "end", "copies"),
                ]
            if worker.recorder is not None:
                places.append((worker.recorder, "decoded", "recording"))
            with ExitStack() as calls, counter.during("commit"):
                for owner, name, phase in places:
                    called = counter.during(phase)(getattr(owner, name))
                    calls.enter_context(mock.patch.object(owner, name, called))
                result = worker.decode(self.batch, None, None)
                with counter.during("recording"):
                    # The scheduler does so, after it has launched the copies of results.
                    rows = result.logits_output.auxiliary_device_output
                    assert (rows is None) == (worker.recorder is None)
                    _ = rows and rows.copy_to_host(None)
            with counter.during("prefill"):
                self._prefill()
            return counter

    def _prefill(self) -> None:
        """What ``verification.prefill``'s hooks do when the same requests get their first token."""
        worker, logits = self.worker, self.logits[: self.bs]
        sampled = not worker.request_state.current.all_greedy
        sampler = PrefillSampler(worker.model_runner, worker.request_state, worker.verifier)
        sampler.penalise(logits)
        sampler.read(logits, sampled=sampled)
        tokens = self.batch.req_pool_indices  # of a greedy batch, SGLang's argmax
        if sampled:
            tokens, _ = sampler.draw(logits, self.batch.seq_lens)
        sampler.end(tokens)
