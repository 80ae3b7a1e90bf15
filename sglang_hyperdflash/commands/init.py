"""``hyperdflash init``: a new draft checkpoint for a target folder or hub id."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from sglang_hyperdflash.draft.config import CANDIDATES, FORMS, REDUCERS
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, load_tokenizer
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.command_line import COUNT, number
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import check, claim, keep_apart, location
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config, shape_for
from sglang_hyperdflash.training.model_card import CARD, model_card, shape_lines

KIND = "hyperdflash init"


def size(text: str) -> int:
    """Parse a size; ``none``, as ``init`` prints it, is 0."""
    return 0 if text == "none" else int(text)


SIZE_OR_NONE = number(size, "at least 0", lambda n: n >= 0)
# Options that replace one size of the default shape, and their help texts.
SIZES = {
    "layers": "transformer layers (default: from the target)",
    "heads": "attention heads (default: from the target)",
    "kv_heads": "K/V heads (default: from the target)",
    "head_dim": "width of a head (default: from the target)",
    "intermediate_size": "width of the MLP (default: three times the hidden size)",
    "block_size": "rows of a block: the anchor plus the drafts (default: 7)",
    "window": "context tokens that a block may see; none for all (default: from the target)",
    "dependency_rank": "rank of the dependency head; 0 for the paper's drafter, which has none "
    "(default: from the target)",
    "dependency_top_k": "candidates of a draft that the dependency head scores when serving "
    f"(default: {CANDIDATES})",
}


def add_parser(commands) -> None:
    """Register ``init`` and its arguments."""
    parser = commands.add_parser(
        "init",
        help="make a new drafter for a target",
        description="Make an untrained draft checkpoint whose gate starts as the target's own "
        "collapse, where it has one. Reads only the target's config.json and gate. The default "
        "shape follows the target's hidden size, layers and context length, and is printed.",
    )
    add = parser.add_argument
    add("--target", required=True, help="target folder or hub id")
    add("--revision", help="branch, tag or commit of a hub id (default: the main branch)")
    add("--out", type=Path, required=True, help="new folder for the draft checkpoint")
    for name, text in SIZES.items():
        kind = SIZE_OR_NONE if name in ("window", "dependency_rank") else COUNT
        add(f"--{name.replace('_', '-')}", type=kind, help=text)
    add("--rope-theta", type=float, default=DrafterShape.rope_theta, help="RoPE base")
    text = "causal attention inside a block, "
    text += "so that the first drafts are the same at every verify width"
    add("--causal", action="store_true", help=text)
    text = "reduction of the residual paths to one state: the gate of the method, or a linear "
    text += "projection (default: hc_gate, with --layer-ids fc)"
    add("--reducer", choices=REDUCERS, help=text)
    text = "start of the gate; approximate: the closest gate of a target without an hc_head of its "
    text += "own (DeepSeek-V4.1)"
    add("--gate", choices=("inherited", "approximate"), default="inherited", help=text)
    text = "read the outputs of these target layers, from 0, instead of the pre-collapse residual, "
    text += "DFlash-style (default: none)"
    add("--layer-ids", type=int, nargs="+", help=text)
    text = "form of the dependency head; product: the selector of DFlash 2"
    add("--dependency-form", choices=FORMS, default=FORMS[0], help=text)
    add("--mask-token-id", type=int, help="mask token (default: the target tokenizer's)")
    add("--seed", type=int, default=0, help="random seed for the new weights")
    parser.set_defaults(run=run)


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


def starting_gate(
    files: TargetFiles, facts: TargetFacts, option: str, hc_head: HcHead | None
) -> tuple[str, HcHead]:
    """Return what the hc_gate starts from (one of ``config.GATES``), and its tensors.

    Args:
        option: the value of ``--gate``.
        hc_head: the target's, or None if it does not collapse with one.

    Raises:
        HyperDFlashConfigError: the target has no such gate; the message says what to choose.
    """
    kind, name = files.kind, f"target {files.name} ({facts.architecture})"
    if kind.gate_start == "fc":
        raise HyperDFlashConfigError(
            f"{name} has no gate for each path to start from: {kind.statement}. Use --reducer fc."
        )
    if kind.gate_start == "exact" and hc_head is None:
        raise HyperDFlashConfigError(
            f"{name} has no hc_head to inherit a gate from. "
            "Use --reducer fc: a linear projection, trained from scratch."
        )
    if kind.gate_start == "approximate":
        if option != "approximate":
            raise HyperDFlashConfigError(
                f"{name} is {kind.name}: {kind.statement}. Choose --gate approximate to start from "
                "it nevertheless, or --reducer fc: a linear projection, trained from scratch."
            )
        shape = facts.hc_mult, facts.hidden_size, facts.num_hidden_layers
        return "approximate", files.lagged_gate(*shape)
    if option == "approximate":
        raise HyperDFlashConfigError(
            f"--gate approximate is for targets without a gate of their own; {name} has one: "
            f"{kind.statement}. Drop --gate."
        )
    return "inherited", hc_head


def new_drafter(
    files: TargetFiles, facts: TargetFacts, args: argparse.Namespace, mask_token_id: int
) -> Drafter:
    """Make an untrained drafter for the target; an hc_gate starts from the target's gate.

    Raises:
        HyperDFlashConfigError: the target cannot have such a drafter.
    """
    shape = shape_of(args, facts)
    if shape.reducer == "fc" and args.gate != "inherited":
        raise HyperDFlashConfigError(f"--gate {args.gate} needs --reducer hc_gate, found fc.")
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    raw = draft_config(facts, hc_head, shape, mask_token_id)
    gate = None
    if shape.reducer == "hc_gate":
        raw["hyperdflash_config"]["gate"], gate = starting_gate(files, facts, args.gate, hc_head)
    torch.manual_seed(args.seed)
    drafter = Drafter(raw)
    if gate is not None:
        drafter.inherit(gate)
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


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; print its target, shape, reducer and dependency head."""
    keep_apart("--out", args.out, {"the target": args.target})
    options = {k: v for k, v in vars(args).items() if k not in ("command", "run", "out", "target")}
    settings = options | {"target": location(args.target)}
    check(args.out, KIND, settings)
    files = TargetFiles(args.target, args.revision)
    facts = TargetFacts.from_config(files.config())  # names the fields that the config lacks
    drafter = new_drafter(files, facts, args, mask_token(args))
    with claim(args.out, KIND, settings):
        write_text(args.out / CARD, model_card(drafter.raw, args.target))
        drafter.save(args.out)
    kind, paths = files.kind, f"{facts.hc_mult} x {facts.hidden_size}"
    print(f"target  {args.target}: {facts.architecture} ({kind.name}), {paths}")
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"drafter {args.out}: {parameters:,} parameters")
    for name, text in shape_lines(drafter.raw).items():
        print(f"{name:<7} {text}")
    if kind.not_served is not None:
        print(f"serving not yet: {kind.not_served}")
    return 0
