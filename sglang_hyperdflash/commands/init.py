"""``hyperdflash init``: a new draft checkpoint for a target folder or hub id."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.draft.config import FORMS, LAYER_SOURCES, SOURCES, check_fingerprint
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, mask_token_of
from sglang_hyperdflash.targets.kinds import constant_gate
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import check, claim, keep_apart, location
from sglang_hyperdflash.training.drafter import (
    Drafter,
    DrafterShape,
    draft_config,
    with_dependency,
)

KIND = "hyperdflash init"
# What --from takes from the drafter that it starts from, and what each is where nobody asked.
SIZES_OF_ORIGIN = {
    name: getattr(DrafterShape(), name)
    for name in (
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "block_size",
        "window",
        "reducer",
        "rope_theta",
    )
} | {"intermediate_size": None, "layer_ids": None, "source": "pre_hc_head", "gate": "inherited"}
SIZES_OF_ORIGIN |= {"no_path_norm": False, "mask_token_id": None}


def add_parser(commands) -> None:
    """Register ``init`` and its arguments."""
    parser = commands.add_parser(
        "init",
        help="make a new drafter for a target",
        description="Make an untrained draft checkpoint whose gate starts as the target's own "
        "collapse, where it has one. Reads the target's config.json and gate only.",
    )
    add = parser.add_argument
    add("--target", required=True, help="target folder or hub id")
    add("--revision", help="branch, tag or commit of a hub id (default: its main one)")
    add("--out", type=Path, required=True, help="new folder for the draft checkpoint")
    default = DrafterShape()
    _add_sizes(add, default)
    _add_reducer(add)
    _add_dependency(add, default)
    add(
        "--from",
        dest="origin",
        type=Path,
        help="a drafter of this target whose weights and sizes are taken; the dependency head and "
        "--causal are added to it (default: new weights)",
    )
    add("--mask-token-id", type=int, help="default: the target tokenizer's mask token")
    add("--seed", type=int, default=0, help="of the new weights")
    parser.set_defaults(run=run)


def _add_sizes(add: Callable[..., Any], default: DrafterShape) -> None:
    """Sizes of the drafter's layers and blocks; ``add`` is ``parser.add_argument``."""
    add("--layers", type=int, default=default.layers, help="transformer layers")
    add("--heads", type=int, default=default.heads, help="attention heads")
    add("--kv-heads", type=int, default=default.kv_heads, help="K/V heads")
    add("--head-dim", type=int, default=default.head_dim, help="width of a head")
    add("--intermediate-size", type=int, help="default: three times the hidden size")
    add("--block-size", type=int, default=default.block_size, help="anchor plus drafts")
    add("--window", type=int, help="context tokens that a block may see (default: all)")
    add("--rope-theta", type=float, default=default.rope_theta, help="base of RoPE")
    add(
        "--causal",
        action="store_true",
        help="a block's row sees no later row: the first drafts are the same at every verify width",
    )


def _add_reducer(add: Callable[..., Any]) -> None:
    """How the paths become one state, and what is read of the target."""
    add(
        "--reducer",
        choices=("hc_gate", "fc"),
        default="hc_gate",
        help="how the paths become one state: the method's gate, or a generic projection",
    )
    add(
        "--gate",
        choices=("inherited", "approximate", "random"),
        default="inherited",
        help="approximate: the gate nearest to the collapse of a target that cannot hand over its "
        "own (DeepSeek-V4.1); random: an hc_gate that inherits nothing, to compare with",
    )
    add(
        "--source",
        choices=SOURCES,
        default="pre_hc_head",
        help="what the reducer reads; the others, with --reducer fc, are there to compare with",
    )
    add(
        "--layer-ids",
        type=int,
        nargs="+",
        help="target layers of a --source with layers, from 0 (default: none)",
    )
    add("--no-path-norm", action="store_true", help="gate the raw residual paths")


def _add_dependency(add: Callable[..., Any], default: DrafterShape) -> None:
    """The dependency head, and its form."""
    add(
        "--dependency-rank",
        type=int,
        help="rank of a dependency head, through which a draft knows the one before it "
        "(default: no head)",
    )
    add(
        "--dependency-top-k",
        type=int,
        help="candidates of a draft that the head scores when serving (default: 64)",
    )
    add(
        "--dependency-form",
        choices=FORMS,
        default=default.dependency_form,
        help="product: DFlash 2's selector, to compare with",
    )


def shape_of(args: argparse.Namespace, hidden_size: int) -> DrafterShape:
    """The drafter's sizes; raises ``HyperDFlashConfigError`` for sizes that cannot work."""
    sizes = ("layers", "heads", "kv_heads", "head_dim", "block_size", "intermediate_size")
    given = {name: getattr(args, name) for name in sizes}
    wrong = [name for name, size in given.items() if size is not None and size < 1]
    if wrong:
        raise HyperDFlashConfigError(f"--{wrong[0].replace('_', '-')} must be at least 1.")
    if args.heads % args.kv_heads:
        raise HyperDFlashConfigError(
            f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}."
        )
    if (args.source in LAYER_SOURCES) != bool(args.layer_ids):
        raise HyperDFlashConfigError(
            "a --source with layers needs --layer-ids, and no other source takes them."
        )
    check_dependency(args)
    if args.head_dim % 2:
        raise HyperDFlashConfigError(f"--head-dim {args.head_dim} must be even, for RoPE.")
    return DrafterShape(
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate_size or 3 * hidden_size,
        block_size=args.block_size,
        reducer=args.reducer,
        path_norm=not args.no_path_norm,
        rope_theta=args.rope_theta,
        source=args.source,
        layer_ids=tuple(args.layer_ids or ()),
        window=args.window,
        causal=args.causal,
        dependency_rank=args.dependency_rank,
        dependency_top_k=args.dependency_top_k,
        dependency_form=args.dependency_form,
    )


def check_dependency(args: argparse.Namespace) -> None:
    """Refuse sizes of a dependency head that cannot work."""
    for name in ("dependency_rank", "dependency_top_k"):
        size = getattr(args, name)
        if size is not None and size < 1:
            raise HyperDFlashConfigError(
                f"--{name.replace('_', '-')} must be at least 1, found {size}."
            )
    chosen = args.dependency_top_k is not None or args.dependency_form != FORMS[0]
    if args.dependency_rank is None and chosen:
        raise HyperDFlashConfigError(
            "--dependency-top-k and --dependency-form are of a dependency head, which is not asked "
            "for. Pass --dependency-rank too."
        )


def grown_drafter(files: TargetFiles, args: argparse.Namespace) -> tuple[Drafter, TargetFacts]:
    """The drafter ``--from`` with a new dependency head, or a causal block, beside its weights.

    Raises:
        HyperDFlashConfigError: it has a head, is another target's, or other sizes were asked for.
    """
    given = [name for name, value in SIZES_OF_ORIGIN.items() if getattr(args, name) != value]
    if given:
        raise HyperDFlashConfigError(
            f"--from takes its sizes from {args.origin}; found --{given[0].replace('_', '-')} too. "
            "Drop one of them."
        )
    check_dependency(args)
    old = Drafter.load(args.origin)
    if old.dependency is not None and args.dependency_rank is not None:
        raise HyperDFlashConfigError(
            f"the drafter {args.origin} has a dependency head already. Drop --dependency-rank, or "
            "start from one without."
        )
    facts = TargetFacts.from_config(files.config())
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    check_fingerprint(old.config, None if hc_head is None else hc_head.fingerprint())
    shape = DrafterShape(
        causal=args.causal,
        dependency_rank=args.dependency_rank,
        dependency_top_k=args.dependency_top_k,
        dependency_form=args.dependency_form,
    )
    torch.manual_seed(args.seed)
    drafter = Drafter(with_dependency(old.raw, shape))
    drafter.load_state_dict(old.state_dict(), strict=False)
    return drafter, facts


def starting_gate(
    files: TargetFiles, facts: TargetFacts, args: argparse.Namespace, hc_head: HcHead | None
) -> tuple[str, HcHead | None]:
    """What the hc_gate starts from (one of ``config.GATES``) and its tensors, None for random.

    Args:
        hc_head: the target's own, where it collapses with one.

    Raises:
        HyperDFlashConfigError: the target's kind has no such start; what to choose instead.
    """
    kind, name = files.kind, f"target {files.name} ({facts.architecture})"
    if kind.gate_start == "fc":
        raise HyperDFlashConfigError(
            f"{name} has no gate that a path's could start from: {kind.statement}. Use "
            "--reducer fc."
        )
    if kind.gate_start == "exact" and hc_head is None:
        raise HyperDFlashConfigError(
            f"{name} has no hc_head to inherit a gate from. "
            "Use --reducer fc: the generic projection, trained from scratch."
        )
    if kind.gate_start == "approximate" and args.gate != "approximate":
        raise HyperDFlashConfigError(
            f"{name} is {kind.name}: {kind.statement}. Choose --gate approximate to start from it "
            "all the same, or --reducer fc: the generic projection, trained from scratch."
        )
    if kind.gate_start == "approximate":
        m, d = facts.hc_mult, facts.hidden_size
        return "approximate", files.lagged_gate(m, d, facts.num_hidden_layers)
    if args.gate == "approximate":
        raise HyperDFlashConfigError(
            f"--gate approximate is for targets that cannot hand over their own gate; {name} can: "
            f"{kind.statement}. Drop --gate."
        )
    if kind.gate_start == "constant":
        if args.gate == "random":
            raise HyperDFlashConfigError(
                f"--gate random is there to compare with an inherited hc_head; {name} has none. "
                "Drop --gate."
            )
        return "constant", constant_gate(facts.hc_mult, facts.hidden_size, facts.hc_eps)
    return args.gate, None if args.gate == "random" else hc_head


def new_drafter(
    files: TargetFiles, args: argparse.Namespace, mask_token_id: int
) -> tuple[Drafter, TargetFacts]:
    """An untrained drafter for the target, its gate inherited where the reducer has one.

    Raises:
        HyperDFlashConfigError: the target cannot have such a drafter.
    """
    if args.reducer == "fc" and args.gate != "inherited":
        raise HyperDFlashConfigError(f"--gate {args.gate} needs --reducer hc_gate, found fc.")
    facts = TargetFacts.from_config(files.config())
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    shape = shape_of(args, facts.hidden_size)
    raw = draft_config(facts, hc_head, shape, mask_token_id)
    gate = None
    if args.reducer == "hc_gate":
        start, gate = starting_gate(files, facts, args, hc_head)
        raw["hyperdflash_config"]["gate"] = start
    torch.manual_seed(args.seed)
    drafter = Drafter(raw)
    if gate is not None:
        drafter.inherit(gate)
    elif args.reducer == "hc_gate":
        drafter.reducer.randomise()
    return drafter, facts


def reducer_line(drafter: Drafter) -> str:
    """What the reducer started from, and whether that is the target's own collapse."""
    config = drafter.config
    if config.reducer == "fc":
        return "fc, a generic projection: nothing is inherited"
    starts = {
        "inherited": "hc_gate inherited exactly from the target's hc_head",
        "random": "hc_gate at random: nothing is inherited",
        "approximate": "hc_gate APPROXIMATE, from the last layer's hc_ffn: the target applies that "
        "gate one sub-layer later than it computes it, so this is not its collapse",
        "constant": f"hc_gate constant, 1/{config.hc_mult} on every path, exactly the target's: "
        "its collapse is a mean; no tensor is read",
    }
    return f"{starts[config.gate]}, path norm {'on' if config.path_norm else 'off'}"


def mask_token(args: argparse.Namespace) -> int:
    """The id that drafted places hold.

    Raises:
        HyperDFlashConfigError: the tokenizer has none and none was given.
    """
    mask = args.mask_token_id
    if mask is None:
        mask = mask_token_of(args.target, args.revision)
    if mask is None:
        raise HyperDFlashConfigError(
            f"the tokenizer of {args.target} has no mask token; pass --mask-token-id, the id of a "
            "token that never occurs in text (it must stay the same when serving)."
        )
    return mask


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and say what it is."""
    keep_apart("--out", args.out, {"the target": args.target})
    options = {k: v for k, v in vars(args).items() if k not in ("command", "run", "out", "target")}
    settings = options | {"target": location(args.target)}
    if args.origin is not None:
        settings["origin"] = location(args.origin)
    check(args.out, KIND, settings)
    files = TargetFiles(args.target, args.revision)
    TargetFacts.from_config(files.config())  # says what the folder lacks
    if args.origin is not None:
        keep_apart("--out", args.out, {"--from": args.origin})
        drafter, facts = grown_drafter(files, args)
    else:
        drafter, facts = new_drafter(files, args, mask_token(args))
    with claim(args.out, KIND, settings):
        drafter.save(args.out)
    count = sum(p.numel() for p in drafter.parameters())
    kind = files.kind
    print(
        f"target  {args.target}: {facts.architecture} ({kind.name}), "
        f"{facts.hc_mult} x {facts.hidden_size}"
    )
    print(
        f"drafter {args.out}: {drafter.config.num_hidden_layers} layers, {count:,} parameters, "
        f"block {drafter.config.block_size}{', causal' if drafter.config.causal else ''}"
    )
    print(f"reducer {reducer_line(drafter)}")
    config = drafter.config
    if config.dependency is not None:
        print(f"head    rank {config.dependency.rank}, {config.dependency.top_k} candidates")
    if config.source != "pre_hc_head":
        print(f"source  {config.source}, not the pre-collapse residual of the method")
    if kind.not_served is not None:
        print(f"serving not yet: {kind.not_served}")
    return 0
