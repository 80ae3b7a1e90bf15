"""``hyperdflash plan``: what a drafter's K/V costs on a DeepSeek-V4 node, by SGLang's own sizing.

Nothing is loaded and no GPU is needed: SGLang resolves the server's arguments and runs its pool
configurator, with our hooks, on the two checkpoints' ``config.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.targets.kinds import text_fields
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

GIB = 1 << 30
# What SGLang reads of a V4 target to size its pools; its config class has defaults for some.
SIZED_BY = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "hc_mult"),
    *("head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window", "compress_ratios"),
    "max_position_embeddings",
)
# Method -> server arguments beyond the target's.
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
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

    gpu_gib: memory of a GPU. weights_gib: of the target's and the draft's weights on one GPU.
    max_running_requests: None for SGLang's own choice, which depends on the method.
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
        """What is left for K/V on one GPU."""
        return int((self.gpu_gib * self.mem_fraction - self.weights_gib) * GIB)


@dataclass(frozen=True)
class Budget:
    """One method's cost on one GPU; ``tokens`` is the capacity in full tokens.

    The bytes of a token are the target's own, as without speculation; those of
    ``draft_bytes_per_token``; and those of the speculation, ``spec_bytes_per_token``: a V4 target
    keeps longer rings of compression states and of its window when several tokens are verified at
    once, whatever drafts them. requests: the most at a time.
    HYPERDFLASH besides the K/V memory: draft_graph_bytes by the draft's attention backend,
    extra_bytes by purpose; widths: each has graphs of the target, of captured batch sizes.
    """

    method: str
    bytes_per_token: float
    tokens: int
    draft_bytes_per_token: float
    spec_bytes_per_token: float = 0.0
    requests: int | None = None
    draft_graph_bytes: dict[str, int] = field(default_factory=dict)
    extra_bytes: dict[str, int] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    captured: int = 0


@dataclass(frozen=True)
class Unavailable:
    """A method that SGLang does not start for this target, with the reason."""

    method: str
    reason: str


def resolved_arguments(target: str, node: Node, **options: Any):
    """SGLang's server arguments for a node, resolved as a server would.

    Raises:
        HyperDFlashConfigError: ours; SGLang's own ``ValueError`` and ``AssertionError`` otherwise.
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
        load_format="dummy",  # no weights are needed
        tp_size=node.tp,
        mem_fraction_static=node.mem_fraction,
        max_running_requests=node.max_running_requests,
        context_length=node.context_length,
        **options,
    )
    arguments.resolve_once()
    return arguments


def _models(arguments):
    """The target's ``ModelConfig``, the algorithm, and what SGLang reads of the draft's model.

    Seams: ``ModelConfig``, ``resolve_spec_aux_hidden_state_config``.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    model = ModelConfig.from_server_args(arguments)
    algorithm = SpeculativeAlgorithm.from_string(arguments.resolved_dict()["speculative_algorithm"])
    aux = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=arguments, model_config=model, spec_algorithm=algorithm, is_draft_worker=False
    )
    return model, algorithm, aux


def pool_configurator(arguments):
    """SGLang's ``DSV4PoolConfigurator`` of the target's worker, our hooks included.

    Seams: ``create_context``/``use_context`` (must surround this call) and the attributes of
    ``KVCacheConfigurator`` that the configurator reads.
    """
    from sglang.srt.mem_cache.draft_kv_budget import resolve_dflash_draft_cell_size
    from sglang.srt.model_executor import pool_configurator as pools
    from sglang.srt.runtime_context import draft_attn_tp_size, get_model, get_parallel, get_schedule

    model, algorithm, aux = _models(arguments)
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
    """What one method leaves on the node.

    Raises:
        HyperDFlashConfigError: the method does not start for this target.
    """
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
    from sglang.srt.runtime_context import create_context, get_schedule, use_context

    options = dict(METHODS[method])
    if draft is not None and method != "none":
        options["speculative_draft_model_path"] = draft
    arguments = resolved_arguments(target, node, **options)
    with use_context(create_context(arguments, role="scheduler")):
        pool = pool_configurator(arguments)
        sizes = pool.calculate_pool_sizes(node.kv_bytes, get_schedule().page_size)
        full = float(pool.bytes_per_full_token)
        # What the same target costs with the rings of any speculation, but no draft.
        pool.bytes_per_swa_token = pool._get_bytes_per_swa_token()
        plain = pool._get_bytes_per_full_token()
        requests = get_schedule().max_running_requests
        ours = _extra_device_memory(arguments, int(requests)) if method == ALGORITHM else {}
    tokens = int(sizes.max_total_num_tokens)
    return Budget(method, full, tokens, full - plain, 0.0, requests, **ours)


def _explained(rows: list[Budget | Unavailable]) -> list[Budget | Unavailable]:
    """The rows with what speculation adds to the target's own bytes, which the first row has."""
    own = rows[0].bytes_per_token
    return [
        replace(row, spec_bytes_per_token=row.bytes_per_token - row.draft_bytes_per_token - own)
        if isinstance(row, Budget)
        else row
        for row in rows
    ]


def _extra_device_memory(arguments, requests: int) -> dict[str, Any]:
    """A :class:`Budget`'s fields besides K/V, as if all requests were in one captured batch."""
    from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import draft_attn_tp_size, get_exec

    from sglang_hyperdflash.serving.draft_attention import DraftGraphs, graph_bytes
    from sglang_hyperdflash.serving.extra_device_memory import Batches, extra_device_memory
    from sglang_hyperdflash.serving.start_checks import load_draft_config
    from sglang_hyperdflash.serving.width_settings import read_setting

    resolved, drafter = arguments.resolved_dict(), load_draft_config(arguments)
    model, _, aux = _models(arguments)
    draft, block = aux.draft_model_config, int(resolved["speculative_num_draft_tokens"])
    captured = generate_decode_cuda_graph_batch_sizes(arguments, requests)
    # Ranks that run batches of their own are all at the block's.
    separate = resolved["enable_dp_attention"]
    widths = (block,) if separate else read_setting(block, drafter.causal).built(block)
    batches = Batches(
        requests,
        captured,
        block,
        drafter.source_width,
        model.vocab_size,
        drafter.candidates,
        drafter.dependency.rank if drafter.dependency else 0,
        1 if separate else int(resolved["tp_size"]),
    )
    graphs = DraftGraphs(
        requests=requests,
        captured=len(captured),
        context=int(model.context_len),
        window=resolved["speculative_draft_window_size"],
        page=int(resolved["page_size"]),
        block=block,
        widths=widths,
        heads=draft.get_max_num_attention_heads() // draft_attn_tp_size(),
        head_dim=int(draft.v_head_dim),
        splits=int(get_exec().kernel.triton_attention_num_kv_splits),
        # DeepSeek-V4's own attention has none.
        workspace=int(envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()),
    )
    return {
        "draft_graph_bytes": graph_bytes(graphs),
        "extra_bytes": extra_device_memory(batches),
        "widths": widths,
        "captured": len(captured),
    }


def _is_v4(target: str) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_v4
    from sglang.srt.utils.hf_transformers_utils import get_config

    return is_deepseek_v4(get_config(target, trust_remote_code=False))


def _check_fields(target: str) -> None:
    """Refuse a target without the fields that size its pools: a default would mislead."""
    fields = text_fields(TargetFiles(target).config())
    missing = [name for name in SIZED_BY if fields.get(name) is None]
    if missing:
        raise HyperDFlashConfigError(
            f"the config.json of {target} lacks {', '.join(missing)}, which K/V pools are sized "
            "by. Add the fields; examples/deepseek_v4_flash_config has the published ones."
        )


def plan(
    target: str, draft: str, node: Node, dspark: str | None = None
) -> list[Budget | Unavailable]:
    """Budgets without speculation and with the drafter, and, where they start, MTP and DSPARK.

    Args:
        dspark: folder or hub id of a DSPARK draft; not needed when the target carries one.

    Raises:
        HyperDFlashConfigError: not a V4 target, or no memory left besides the weights.
    """
    if node.kv_bytes <= 0:
        raise HyperDFlashConfigError(
            f"{node.gpu_gib:g} GiB x {node.mem_fraction:g} leaves no memory besides weights of "
            f"{node.weights_gib:g} GiB a GPU; raise --tp or lower --weights-gib."
        )
    if not _is_v4(target):
        raise HyperDFlashConfigError(
            f"{target} is not a DeepSeek-V4 target; SGLang counts the drafter exactly for other "
            "targets, and prints the capacity when the server starts."
        )
    _check_fields(target)
    rows: list[Budget | Unavailable] = [
        budget(target, node, "none", None),
        budget(target, node, ALGORITHM, draft),
    ]
    for method, path in (("EAGLE", None), ("DSPARK", dspark)):
        try:
            rows.append(budget(target, node, method, path))
        except HyperDFlashConfigError as error:
            rows.append(Unavailable(method, str(error)))
    return _explained(rows)


def report(rows: list[Budget | Unavailable], node: Node) -> str:
    """The plan as text."""
    budgets = [row for row in rows if isinstance(row, Budget)]
    own, base = budgets[0].bytes_per_token, budgets[0].tokens
    limit = node.max_running_requests
    chosen = "SGLang's own choice" if limit is None else "--max-running-requests"
    lines = [
        f"K/V memory on one GPU: {node.kv_bytes / GIB:.1f} GiB (tp {node.tp}"
        f"{', DP attention' if node.dp_attention else ''}; requests at a time: {chosen})",
        "",
        f"{'method':<14}{'bytes/token':>12}{'= target':>10}{'+ rings':>9}{'+ draft':>9}"
        f"{'tokens':>12}{'of none':>9}{'requests':>10}",
    ]
    for b in budgets:
        lines.append(
            f"{b.method:<14}{b.bytes_per_token:>12.0f}{own:>10.0f}{b.spec_bytes_per_token:>9.0f}"
            f"{b.draft_bytes_per_token:>9.0f}{b.tokens:>12,}{b.tokens / base:>9.0%}"
            f"{b.requests or '':>10}"
        )
    missing = [row for row in rows if isinstance(row, Unavailable)]
    lines += [f"{row.method:<14}{row.reason}" for row in missing]
    lines += [
        "",
        "rings: the target's own compression states and window, longer while drafts are verified.",
    ]
    if limit is None and len({b.requests for b in budgets}) > 1:
        lines.append(
            "requests differ: by default SGLang admits fewer with speculation. "
            "Set --max-running-requests to compare equal numbers."
        )
    for b in budgets:
        if b.extra_bytes:
            lines += ["", *_beside_lines(b, node)]
    return "\n".join(lines)


def _beside_lines(b: Budget, node: Node) -> list[str]:
    """What must fit besides the K/V, and what SGLang leaves for it."""
    choices = ", ".join(f"{k} {v / GIB:.2f}" for k, v in b.draft_graph_bytes.items())
    dearest = max(b.draft_graph_bytes.values(), default=0)
    parts = {**b.extra_bytes, f"draft attention at most ({choices})": dearest}
    left = node.gpu_gib * (1 - node.mem_fraction)
    lines = [f"Besides weights and K/V, {b.method} takes at most (GiB; SGLang leaves {left:.1f}):"]
    lines += [f"{size / GIB:>10.2f}  {name}" for name, size in parts.items()]
    lines.append(f"{sum(parts.values()) / GIB:>10.2f}  together")
    widths = ", ".join(map(str, b.widths))
    lines.append(
        f"Not counted: the target's own graphs, of {b.captured} batch sizes at width {widths}."
    )
    return lines


def _weights_gib(target: str, tp: int) -> float | None:
    """Bytes of a local checkpoint's tensors, split over ``tp`` GPUs, or None without an index.

    Raises:
        HyperDFlashConfigError: the index is damaged.
    """
    index = TargetFiles(target).index() if Path(target).is_dir() else None
    metadata = (index or {}).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size / tp / GIB if isinstance(size, (int, float)) else None


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise ``HyperDFlashConfigError`` for an impossible count or size."""
    for name in ("tp", "context_length", "max_running_requests"):
        found = getattr(args, name)
        if found is not None and found < 1:
            raise HyperDFlashConfigError(
                f"--{name.replace('_', '-')} must be at least 1, found {found}."
            )
    if not 0 < args.gpu_gib < math.inf:
        raise HyperDFlashConfigError(f"--gpu-gib must be a number above 0, found {args.gpu_gib:g}.")
    if args.weights_gib is not None and not 0 <= args.weights_gib < math.inf:
        raise HyperDFlashConfigError(
            f"--weights-gib must be a number of at least 0, found {args.weights_gib:g}."
        )
    if not 0 < args.mem_fraction_static <= 1:
        raise HyperDFlashConfigError(
            "--mem-fraction-static must be above 0 and at most 1, found "
            f"{args.mem_fraction_static:g}."
        )


def run(args: argparse.Namespace) -> int:
    """Print the plan, or its JSON."""
    _check_numbers(args)
    weights = args.weights_gib
    if weights is None:
        weights = _weights_gib(args.target, args.tp)
    if weights is None:
        raise HyperDFlashConfigError(
            "--weights-gib is needed: the target's folder has no safetensors index that says the "
            "weights' size."
        )
    node = Node(
        gpu_gib=args.gpu_gib,
        weights_gib=weights,
        tp=args.tp,
        mem_fraction=args.mem_fraction_static,
        max_running_requests=args.max_running_requests,
        context_length=args.context_length,
        dp_attention=args.dp_attention,
    )
    rows = plan(args.target, args.draft, node, args.dspark)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(report(rows, node))
    return 0


def add_parser(commands) -> None:
    """Add ``hyperdflash plan``."""
    parser = commands.add_parser("plan", help="what the drafter's K/V costs on a DeepSeek-V4 node")
    add = parser.add_argument
    add("--target", required=True, help="folder or hub id; only its config.json is read")
    add("--draft", required=True, help="folder or hub id of the HyperDFlash drafter")
    add("--dspark", help="DSPARK draft to compare with (default: the target's own)")
    add("--gpu-gib", type=float, required=True, help="memory of one GPU, GiB")
    add("--weights-gib", type=float, help="weights on one GPU, GiB (default: index size / tp)")
    add("--tp", type=int, default=1, help="GPUs that share the model")
    add(
        "--dp-attention",
        action="store_true",
        help="attention data parallelism: K/V heads are not sharded",
    )
    add("--context-length", type=int, help="tokens (default: the target's own)")
    add(
        "--mem-fraction-static",
        type=float,
        default=0.85,
        help="share of a GPU's memory for weights and K/V",
    )
    add(
        "--max-running-requests",
        type=int,
        help="requests at a time (default: SGLang's choice for each method)",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
