"""``hyperdflash init``: a new draft checkpoint for a target folder or hub id."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sglang_hyperdflash.commands.options import SIZES
from sglang_hyperdflash.draft.config import FORMS
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.serving.draft_kv.size import windowed_cell_size
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, load_tokenizer
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import check, claim, keep_apart, location
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config, shape_for
from sglang_hyperdflash.training.model_card import CARD, model_card, shape_lines

KIND = "hyperdflash init"


def shape_of(args: argparse.Namespace, facts: TargetFacts) -> DrafterShape:
    """Return the default shape for the target, with the sizes of the command line.

    Raises:
        HyperDFlashConfigError: the sizes do not fit each other.
    """
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    shape = replace(
        shape_for(facts),
        rope_theta=args.rope_theta,
        causal=args.causal,
        reducer=args.reducer or ("fc" if args.layer_ids else "hc_gate"),
        layer_ids=tuple(args.layer_ids or ()),
        dependency_form=args.dependency_form,
        **{name: size or None for name, size in sizes.items()},
    )
    if shape.heads % shape.kv_heads:
        raise HyperDFlashConfigError(
            f"--heads {shape.heads} must be a multiple of --kv-heads {shape.kv_heads}."
        )
    if shape.head_dim % 2:
        raise HyperDFlashConfigError(f"--head-dim {shape.head_dim} must be even, for RoPE.")
    needs_head = args.dependency_top_k is not None or args.dependency_form != FORMS[0]
    if shape.dependency_rank is None and needs_head:
        raise HyperDFlashConfigError(
            "--dependency-top-k and --dependency-form need a dependency head; found "
            "--dependency-rank 0. Drop one of them."
        )
    return shape


def check_gate(files: TargetFiles, facts: TargetFacts, gate: str) -> None:
    """Check whether a target's hc_gate can start as ``--gate`` says.

    Raises:
        HyperDFlashConfigError: the target has no such gate; the message says what to choose.
    """
    kind = files.kind
    name = f"target {files.name} ({kind.name}, {facts.architecture})"
    if kind.gate_start == "fc":
        raise HyperDFlashConfigError(
            f"{name} has no gate for each path to start from: {kind.statement}. Use --reducer fc."
        )
    if kind.gate_start == "approximate" and gate != "approximate":
        raise HyperDFlashConfigError(
            f"{name}: {kind.statement}. Choose --gate approximate to start from it nevertheless, "
            "or --reducer fc: a linear projection, trained from scratch."
        )
    if kind.gate_start == "exact" and gate == "approximate":
        raise HyperDFlashConfigError(
            f"--gate approximate is for targets without a gate of their own; {name} has one: "
            f"{kind.statement}. Drop --gate."
        )


def new_drafter(
    files: TargetFiles, facts: TargetFacts, args: argparse.Namespace, mask_token_id: int
) -> Drafter:
    """Make an untrained drafter for the target; an hc_gate starts from the target's gate.

    With ``--dry-run`` it has shapes alone, and no tensor of the target is read.

    Raises:
        HyperDFlashConfigError: the target cannot have such a drafter.
    """
    shape = shape_of(args, facts)
    if shape.reducer == "fc" and args.gate != "inherited":
        raise HyperDFlashConfigError(f"--gate {args.gate} needs --reducer hc_gate, found fc.")
    if not args.dry_run:
        hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    elif files.kind.gate_start == "exact":
        hc_head = HcHead(*torch.zeros(3, 1))  # stands for the target's, in a config without one
    else:
        hc_head = None
    raw = draft_config(facts, hc_head, shape, mask_token_id)
    start = None
    if shape.reducer == "hc_gate":
        check_gate(files, facts, args.gate)
        raw["hyperdflash_config"]["gate"] = args.gate
        start = hc_head
        if args.gate == "approximate" and not args.dry_run:
            start = files.lagged_gate(facts.hc_mult, facts.hidden_size, facts.num_hidden_layers)
        elif args.gate == "inherited" and hc_head is None:
            raise HyperDFlashConfigError(
                f"target {files.name} ({facts.architecture}) has no hc_head to inherit a gate "
                "from. Use --reducer fc: a linear projection, trained from scratch."
            )
    if args.dry_run:
        with torch.device("meta"):
            return Drafter(raw)
    torch.manual_seed(args.seed)
    drafter = Drafter(raw)
    if start is not None:
        drafter.inherit(start)
    return drafter


def mask_token(args: argparse.Namespace) -> int:
    """Return the token id of drafted positions; raise ``HyperDFlashConfigError`` without one."""
    mask = args.mask_token_id
    if mask is None:
        mask = load_tokenizer(args.target, args.revision).mask_token_id
    if mask is None:
        raise HyperDFlashConfigError(
            f"the tokenizer of {args.target} has no mask token; pass --mask-token-id, the id of a "
            "token that never occurs in text (it must stay the same when serving)."
        )
    return mask


def kv_bytes(raw: Mapping[str, Any]) -> int:
    """Return the bf16 K/V bytes of a drafter for a token of the target, on all its GPUs together.

    Args:
        raw: its ``config.json``.
    """
    heads = raw["num_hidden_layers"] * raw["num_key_value_heads"]
    cell = 2 * torch.bfloat16.itemsize * heads * raw["head_dim"]
    return cell if raw["hyperdflash_config"]["window"] is None else windowed_cell_size(cell)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; print its target, shape, reducer, dependency head and K/V.

    Raises:
        HyperDFlashConfigError: ``--out`` or the target cannot be used.
    """
    if args.out is None and not args.dry_run:
        raise HyperDFlashConfigError("--out is needed: a new folder. Give it, or --dry-run.")
    files = TargetFiles(args.target, args.revision)
    if args.dry_run:
        facts = TargetFacts.from_config(files.config())
        drafter = new_drafter(files, facts, args, args.mask_token_id or 0)
    else:
        keep_apart("--out", args.out, {"the target": args.target})
        others = ("command", "dry_run", "out", "target")
        options = {k: v for k, v in vars(args).items() if k not in others}
        settings = options | {"target": location(args.target)}
        check(args.out, KIND, settings)
        facts = TargetFacts.from_config(files.config())  # names the fields that the config lacks
        drafter = new_drafter(files, facts, args, mask_token(args))
        with claim(args.out, KIND, settings):
            write_text(args.out / CARD, model_card(drafter.raw, args.target))
            drafter.save(args.out)
    kind, paths = files.kind, f"{facts.hc_mult} x {facts.hidden_size}"
    print(f"target  {args.target}: {facts.architecture} ({kind.name}), {paths}")
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"drafter {'not written' if args.dry_run else args.out}: {parameters:,} parameters")
    lines = shape_lines(drafter.raw)
    lines["K/V"] = f"{kv_bytes(drafter.raw):,} bytes for each token of a server, over all GPUs"
    for name, text in lines.items():
        print(f"{name:<7} {text}")
    if kind.not_served is not None:
        print(f"serving not yet: {kind.not_served}")
    return 0
