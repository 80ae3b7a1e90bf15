"""``hyperdflash plan``: the cost of a drafter's K/V on a DeepSeek-V4 node, by SGLang's own sizing.

Nothing is loaded and no GPU is needed: SGLang resolves the server's arguments and runs its pool
configurator, with our hooks, on the ``config.json`` of both checkpoints. The cost of a training is
counted in :mod:`sglang_hyperdflash.commands.plan_training`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.commands import plan_training
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.targets.kinds import text_fields
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

GIB = 1 << 30
BASELINE = "baseline"
ARCHITECTURES = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")
# Fields of a V4 target that determine the sizes of its pools; SGLang has defaults for some.
SIZE_FIELDS = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "hc_mult"),
    *("head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window", "compress_ratios"),
    "max_position_embeddings",
)
# The server arguments of each method, besides the target's.
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    ALGORITHM: {"speculative_algorithm": ALGORITHM},
    "EAGLE": {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
    "DSPARK": {"speculative_algorithm": "DSPARK"},
}


@dataclass(frozen=True)
class Node:
    """One tensor-parallel group of GPUs.

    Attributes:
        gpu_gib: the memory of a GPU.
        weights_gib: the weights of target and draft on one GPU.
        mem_fraction: the share of a GPU's memory for weights and K/V.
        max_running_requests: None for SGLang's own choice, which depends on the method.
        context_length: None for the target's own.
        dp_attention: whether every GPU has requests of its own.
    """

    gpu_gib: float
    weights_gib: float
    tp: int = 1
    mem_fraction: float = 0.85
    max_running_requests: int | None = 256
    context_length: int | None = None
    dp_attention: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of one GPU that are left for K/V."""
        return int((self.gpu_gib * self.mem_fraction - self.weights_gib) * GIB)


@dataclass(frozen=True)
class Budget:
    """One method's cost on one GPU.

    Attributes:
        bytes_per_token: the K/V of target and draft; the target's rings of compression states and
            of the window are longer if several tokens are verified.
        draft_bytes_per_token: the draft's part of it.
        tokens: the capacity in full tokens.
        requests: the most requests at once.
        draft_graph_bytes: buffers of HYPERDFLASH's draft graphs, by draft attention backend.
        extra_bytes: other memory of HYPERDFLASH outside weights and K/V, by purpose.
        widths: the verify widths with graphs of the target, whose memory is not counted.
        captured: the number of batch sizes with such graphs.
        reason: why the method does not start here, or None.
    """

    method: str
    tp: int
    bytes_per_token: float = 0.0
    draft_bytes_per_token: float = 0.0
    tokens: int = 0
    requests: int | None = None
    draft_graph_bytes: dict[str, int] = field(default_factory=dict)
    extra_bytes: dict[str, int] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    captured: int = 0
    reason: str | None = None


def resolved_arguments(target: str, node: Node, **options: Any):
    """Return SGLang's server arguments for a node, resolved as a server would.

    Raises:
        HyperDFlashConfigError: our hooks refuse the arguments.
        ValueError, AssertionError: SGLang refuses them.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    if node.dp_attention:
        options |= {"enable_dp_attention": True, "dp_size": node.tp, "enable_dp_lm_head": True}
    arguments = ServerArgs(
        model_path=target,
        device="cuda",
        skip_tokenizer_init=True,
        load_format="dummy",  # no weights are needed, and none are looked for
        tp_size=node.tp,
        mem_fraction_static=node.mem_fraction,
        max_running_requests=node.max_running_requests,
        context_length=node.context_length,
        **options,
    )
    arguments.resolve_once()
    return arguments


def pool_configurator(model, algorithm, aux):
    """Return SGLang's ``DSV4PoolConfigurator`` of the target's worker, with our hooks.

    Seams: ``create_context``/``use_context`` (must surround this call) and the attributes of
    ``KVCacheConfigurator`` that the configurator reads. ``aux`` is what SGLang reads of the draft.
    """
    from sglang.srt.mem_cache.draft_kv_budget import resolve_dflash_draft_cell_size
    from sglang.srt.model_executor import pool_configurator as pools
    from sglang.srt.runtime_context import draft_attn_tp_size, get_model, get_parallel, get_schedule

    cell = None
    if algorithm.is_dflash_family() and aux.draft_model_config is not None:
        cell = resolve_dflash_draft_cell_size(
            draft_model_config=aux.draft_model_config,
            draft_num_layers=aux.dflash_draft_num_layers,
            attn_tp_size=draft_attn_tp_size(),
        )
    return pools.DSV4PoolConfigurator(
        SimpleNamespace(
            kv_cache_dtype_str=get_model().kv_cache_dtype,
            model_config=model,
            spec_algorithm=algorithm,
            spec_aux_config=aux,
            dflash_draft_cell_size_per_token=cell,
            is_draft_worker=False,
            layer_info=SimpleNamespace(start_layer=0, end_layer=model.num_hidden_layers),
            pp_size=1,
            sliding_window_size=model.sliding_window_size,
            page_size=get_schedule().page_size,
            attn_dp_size=get_parallel().attn_dp_size,
        )
    )


def budget(target: str, node: Node, method: str, draft: str | None) -> Budget:
    """Return one method's cost on the node; raise ``HyperDFlashConfigError`` if it cannot start."""
    try:
        return _sized(target, node, method, draft)
    except HyperDFlashConfigError:
        raise
    except (AssertionError, ValueError) as error:
        raise HyperDFlashConfigError(f"SGLang does not start {method} here: {error}") from error
    except (KeyError, AttributeError, TypeError) as error:
        names = f"{target}{f' or {draft}' if draft else ''}"
        raise HyperDFlashConfigError(
            f"the config.json of {names} lacks a field, or holds one of another type, that SGLang "
            f"needs to size its pools ({type(error).__name__}: {error}). Compare it with the "
            "published one."
        ) from error


def _sized(target: str, node: Node, method: str, draft: str | None) -> Budget:
    """Return a budget by SGLang's pool configurator.

    Seams: ``ModelConfig``, ``resolve_spec_aux_hidden_state_config``.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
    from sglang.srt.runtime_context import create_context, get_schedule, use_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    options = dict(METHODS[method])
    if draft is not None and method != BASELINE:
        options["speculative_draft_model_path"] = draft
    arguments = resolved_arguments(target, node, **options)
    resolved = arguments.resolved_dict()
    with use_context(create_context(arguments, role="scheduler")):
        model = ModelConfig.from_server_args(arguments)
        algorithm = SpeculativeAlgorithm.from_string(resolved["speculative_algorithm"])
        aux = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
            server_args=arguments,
            model_config=model,
            spec_algorithm=algorithm,
            is_draft_worker=False,
        )
        pool = pool_configurator(model, algorithm, aux)
        sizes = pool.calculate_pool_sizes(node.kv_bytes, get_schedule().page_size)
        full = float(pool.bytes_per_full_token)
        # The target with the rings of any speculation, but without a draft.
        pool.bytes_per_swa_token = pool._get_bytes_per_swa_token()
        plain = pool._get_bytes_per_full_token()
        requests, extra = get_schedule().max_running_requests, {}
        if method == ALGORITHM:
            extra = _extra_device_memory(arguments, model, aux.draft_model_config, int(requests))
    tokens = int(sizes.max_total_num_tokens)
    return Budget(method, node.tp, full, full - plain, tokens, requests, **extra)


def _extra_device_memory(arguments, model, draft_model, requests: int) -> dict[str, Any]:
    """Return a :class:`Budget`'s fields outside weights and K/V, for one batch of all requests."""
    from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import draft_attn_tp_size, get_exec

    from sglang_hyperdflash.commands.plan_memory import Shape, extra_device_memory, graph_bytes
    from sglang_hyperdflash.serving.settings import read_copy_length, read_width
    from sglang_hyperdflash.serving.startup.checks import load_draft_config

    resolved, drafter = arguments.resolved_dict(), load_draft_config(arguments)
    block = int(resolved["speculative_num_draft_tokens"])
    captured = generate_decode_cuda_graph_batch_sizes(arguments, requests)
    dp_attention = resolved["enable_dp_attention"]
    shape = Shape(
        requests=requests,
        captured=captured,
        block=block,
        widths=read_width(block, drafter.causal).built(block),
        residual=drafter.source_width,
        vocabulary=model.vocab_size,
        candidates=drafter.candidates,
        rank=drafter.dependency.rank if drafter.dependency else 0,
        shards=1 if dp_attention else int(resolved["tp_size"]),
        copied=read_copy_length(block),
        context=int(model.context_len),
        window=resolved["speculative_draft_window_size"],
        page=int(resolved["page_size"]),
        heads=draft_model.get_max_num_attention_heads() // draft_attn_tp_size(),
        head_dim=int(draft_model.v_head_dim),
        splits=int(get_exec().kernel.triton_attention_num_kv_splits),
        # DeepSeek-V4's own attention has no such workspace.
        workspace=int(envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()),
    )
    return {
        "draft_graph_bytes": graph_bytes(shape),
        "extra_bytes": extra_device_memory(shape),
        "widths": shape.widths,
        "captured": len(captured),
    }


def check_target(target: str) -> None:
    """Raise ``HyperDFlashConfigError`` for a target that is not V4, or whose config lacks a field.

    SGLang's default of a missing field would give wrong sizes.
    """
    fields = text_fields(TargetFiles(target).config())
    if not set(ARCHITECTURES) & set(fields.get("architectures") or ()):
        raise HyperDFlashConfigError(
            f"{target} is not a DeepSeek-V4 target. For other targets the server prints the "
            "capacity when it starts."
        )
    missing = [name for name in SIZE_FIELDS if fields.get(name) is None]
    if missing:
        raise HyperDFlashConfigError(
            f"the config.json of {target} lacks {', '.join(missing)}, which K/V pools are sized "
            "by. Add the fields; examples/deepseek_v4_flash_config has the published ones."
        )


def plan(target: str, draft: str, node: Node, dspark: str | None = None) -> list[Budget]:
    """Return the budgets of the baseline, of the drafter, of EAGLE and of DSPARK.

    Args:
        dspark: folder or hub id of a DSPARK draft; not needed if the target has one.

    Raises:
        HyperDFlashConfigError: the weights leave no memory, or the drafter does not start.
    """
    if node.kv_bytes <= 0:
        raise HyperDFlashConfigError(
            f"{node.gpu_gib:g} GiB x {node.mem_fraction:g} leaves no memory besides weights of "
            f"{node.weights_gib:g} GiB per GPU at tp {node.tp}. Raise --tp or lower --weights-gib."
        )
    budgets = [budget(target, node, BASELINE, None), budget(target, node, ALGORITHM, draft)]
    for method, path in (("EAGLE", None), ("DSPARK", dspark)):
        try:
            budgets.append(budget(target, node, method, path))
        except HyperDFlashConfigError as error:
            budgets.append(Budget(method, node.tp, reason=str(error)))
    return budgets


def report(budgets: list[Budget]) -> str:
    """Return one table of all budgets, and the reasons of methods that do not start."""
    baseline = {row.tp: row.tokens for row in budgets if row.method == BASELINE}
    lines = [
        f"{'tp':>2}  {'method':<12}{'bytes/token':>12}{'draft':>8}{'K/V tokens':>13}{'share':>7}"
        f"{'requests':>10}{'other GiB':>11}"
    ]
    for row in (row for row in budgets if row.reason is None):
        other = sum(row.extra_bytes.values()) + max(row.draft_graph_bytes.values(), default=0)
        line = (
            f"{row.tp:>2}  {row.method:<12}{row.bytes_per_token:>12,.0f}"
            f"{row.draft_bytes_per_token:>8,.0f}{row.tokens:>13,}"
            f"{row.tokens / baseline[row.tp]:>7.0%}{row.requests or '':>10}"
            f"{f'{other / GIB:.2f}' if other else '':>11}"
        )
        lines.append(line.rstrip())
    reasons = {f"{row.method}: {row.reason}": None for row in budgets if row.reason is not None}
    return "\n".join([*lines, *reasons])


def _weights_gib(target: str, tp: int) -> float:
    """Return a local target's GiB per GPU; raise ``HyperDFlashConfigError`` if no index has it."""
    index = TargetFiles(target).index() if Path(target).is_dir() else None
    metadata = (index or {}).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(size, (int, float)):
        raise HyperDFlashConfigError(
            "--weights-gib is needed: the target's folder has no safetensors index that says the "
            "weights' size."
        )
    return size / tp / GIB


@contextmanager
def logs_held_back() -> Iterator[None]:
    """Keep what libraries log and warn of, and show it on standard error if the block fails."""
    held = MemoryHandler(10_000, target=logging.StreamHandler(), flushOnClose=False)
    root = logging.getLogger()
    root.handlers, handlers = [held], root.handlers
    logging.captureWarnings(True)
    try:
        yield
    except Exception:
        held.flush()
        raise
    finally:
        logging.captureWarnings(False)
        root.handlers = handlers


def run(args: argparse.Namespace) -> int:
    """Print the plan, or its JSON."""
    for name in ("draft",) if args.training else ("draft", "target", "gpu_gib"):
        if getattr(args, name) is None:
            raise HyperDFlashConfigError(
                f"--{name.replace('_', '-')} is needed for "
                f"{'a training' if args.training else 'K/V memory'}. Give it"
                f"{'' if args.training else ', or --training FILE'}."
            )
    if args.training is not None:
        return plan_training.run(args)
    check_target(args.target)
    budgets = []
    with nullcontext() if args.verbose else logs_held_back():
        for tp in args.tp:
            weights_gib = args.weights_gib
            node = Node(
                gpu_gib=args.gpu_gib,
                weights_gib=_weights_gib(args.target, tp) if weights_gib is None else weights_gib,
                tp=tp,
                mem_fraction=args.mem_fraction_static,
                max_running_requests=args.max_running_requests,
                context_length=args.context_length,
                dp_attention=args.dp_attention,
            )
            budgets += plan(args.target, args.draft, node, args.dspark)
    print(json.dumps(list(map(asdict, budgets)), indent=1) if args.json else report(budgets))
    return 0
