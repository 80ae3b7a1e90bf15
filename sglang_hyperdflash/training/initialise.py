"""``hyperdflash init``: a new draft checkpoint for a target folder or hub id."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sglang_hyperdflash.config import SOURCES, HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.target_files import TargetFacts, TargetFiles, mask_token_of


def add_parser(commands) -> None:
    """Register ``init`` and its arguments."""
    parser = commands.add_parser(
        "init",
        help="make a new drafter for a target",
        description="Make an untrained draft checkpoint whose gate is the target's hc_head. Reads "
        "the target's config.json and hc_head only.",
    )
    default = DrafterShape()
    add = parser.add_argument
    add("--target", required=True, help="target folder or hub id")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--out", type=Path, required=True, help="new folder for the draft checkpoint")
    add("--layers", type=int, default=default.layers)
    add("--heads", type=int, default=default.heads)
    add("--kv-heads", type=int, default=default.kv_heads)
    add("--head-dim", type=int, default=default.head_dim)
    add("--intermediate-size", type=int, help="default: three times the hidden size")
    add("--block-size", type=int, default=default.block_size, help="anchor plus drafts")
    add("--rope-theta", type=float, default=default.rope_theta)
    add("--reducer", choices=("hc_gate", "fc"), default="hc_gate")
    add(
        "--gate",
        choices=("inherited", "random"),
        default="inherited",
        help="random: an hc_gate that inherits nothing, to compare with",
    )
    add(
        "--source",
        choices=SOURCES,
        default="pre_hc_head",
        help="what the reducer reads; the others, with --reducer fc, are there to compare with",
    )
    add("--layer-ids", type=int, nargs="+", help="target layers of --source layers, from 0")
    add("--no-path-norm", action="store_true", help="gate the raw residual paths")
    add("--mask-token-id", type=int, help="default: the target tokenizer's mask token")
    add("--seed", type=int, default=0)
    parser.set_defaults(run=run)


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
    if (args.source == "layers") != bool(args.layer_ids):
        raise HyperDFlashConfigError(
            "--source layers needs --layer-ids, and no other source takes them."
        )
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
    )


def new_drafter(
    files: TargetFiles, args: argparse.Namespace, mask_token_id: int
) -> tuple[Drafter, TargetFacts]:
    """An untrained drafter for the target, its gate inherited where the reducer has one.

    Raises:
        HyperDFlashConfigError: the target cannot have such a drafter.
    """
    facts = TargetFacts.from_config(files.config())
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    if hc_head is None and args.reducer == "hc_gate":
        raise HyperDFlashConfigError(
            f"target {files.name} ({facts.architecture}) has no hc_head to inherit a gate from. "
            "Use --reducer fc: the generic projection, trained from scratch."
        )
    torch.manual_seed(args.seed)
    drafter = Drafter(
        draft_config(facts, hc_head, shape_of(args, facts.hidden_size), mask_token_id)
    )
    if hc_head is not None and args.gate == "inherited":
        drafter.inherit(hc_head)
    elif args.reducer == "hc_gate":
        drafter.reducer.randomise()
    return drafter, facts


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and say what it is."""
    if args.out.exists() and any(args.out.iterdir()):
        raise HyperDFlashConfigError(f"--out {args.out} is not empty; choose a new folder.")
    files = TargetFiles(args.target, args.revision)
    mask = args.mask_token_id
    if mask is None:
        mask = mask_token_of(args.target, args.revision)
    if mask is None:
        raise HyperDFlashConfigError(
            f"the tokenizer of {args.target} has no mask token; pass --mask-token-id, the id of a "
            "token that never occurs in text (it must stay the same when serving)."
        )
    drafter, facts = new_drafter(files, args, mask)
    drafter.save(args.out)
    count = sum(p.numel() for p in drafter.parameters())
    gate = (
        "fc, a generic projection: nothing is inherited"
        if args.reducer == "fc"
        else "hc_gate at random: nothing is inherited"
        if args.gate == "random"
        else "hc_gate inherited exactly from the target's hc_head"
    )
    if args.reducer == "hc_gate":
        gate += f", path norm {'on' if drafter.config.path_norm else 'off'}"
    print(f"target  {args.target}: {facts.architecture}, {facts.hc_mult} x {facts.hidden_size}")
    print(
        f"drafter {args.out}: {args.layers} layers, {count:,} parameters, block {args.block_size}"
    )
    print(f"reducer {gate}")
    if args.source != "pre_hc_head":
        print(f"source  {args.source}, not the pre-collapse residual of the method")
    return 0
