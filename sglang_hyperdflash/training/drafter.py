"""The drafter in plain torch: the same layers and names as the served model.

Qwen3-style layers (RMSNorm, per-head q/k norm, NeoX RoPE, SwiGLU) whose keys and values are the
projected context features followed by the block's own rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sglang_hyperdflash.draft.checkpoint import checked_tensors, expected_tensors, weight_files
from sglang_hyperdflash.draft.config import (
    DRAFT_ARCHITECTURE,
    FORMS,
    HyperDFlashConfig,
    causal_fields,
    default_candidates,
    load_config,
    parse_config,
)
from sglang_hyperdflash.draft.dependency import build_dependency
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.draft.propose import Candidates
from sglang_hyperdflash.draft.reducer import HCGateReducer, build_reducer
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.tools.atomic import replacing, write_json
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# Context tokens that a block may see by default: the longest that common training data have.
WINDOW = 2048


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter that do not follow from its target; the defaults fit the tiny target.

    ``layer_ids``: the drafter reads means of the paths after these target layers (DFlash); empty
    for the pre-collapse residual.
    """

    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    block_size: int = 7
    reducer: str = "hc_gate"
    rope_theta: float = 10000.0
    layer_ids: tuple[int, ...] = ()
    window: int | None = None
    causal: bool = False
    dependency_rank: int | None = None
    dependency_top_k: int | None = None
    dependency_form: str = FORMS[0]


def shape_for(target: TargetFacts) -> DrafterShape:
    """The shape that ``hyperdflash init`` gives a drafter unless it is told another.

    The drafter's layers work at the target's hidden size d, so they are those of a dense Qwen3 of
    that width (Qwen3-8B at d = 4,096): heads of 128 (64 below d = 1,024) that add up to d, an MLP
    of 3 d. At most 8 K/V heads, a power of two where the heads allow it: draft K/V cost memory for
    every token, and 8 split over 8 GPUs. Five layers, as in the paper, fewer for a target of less
    than 16. A window of 2,048 tokens, unless the context is no longer: contexts of a million tokens
    are served, and none is trained on. A dependency head of rank 256, at most d / 2.
    """
    d = target.hidden_size
    head_dim = 128 if d >= 1024 else 64
    heads = max(1, d // head_dim)
    return DrafterShape(
        layers=min(5, 1 + target.num_hidden_layers // 4),
        heads=heads,
        kv_heads=math.gcd(heads, min(8, max(1, heads // 2))),
        head_dim=head_dim,
        intermediate_size=3 * d,
        window=WINDOW if target.max_position_embeddings > WINDOW else None,
        dependency_rank=max(1, min(256, d // 2)),
    )


def draft_config(
    target: TargetFacts, hc_head: HcHead | None, shape: DrafterShape, mask_token_id: int
) -> dict[str, Any]:
    """The ``config.json`` of a new drafter for a target (its fields: draft.config).

    Args:
        hc_head: the target's, or None for a target without one.
    """
    last = target.num_hidden_layers
    dependency = {}
    if shape.dependency_rank is not None:
        top_k = shape.dependency_top_k or default_candidates(target.vocab_size)
        dependency = {"dependency": {"rank": shape.dependency_rank, "top_k": top_k}}
        if shape.dependency_form != FORMS[0]:
            dependency["dependency"]["form"] = shape.dependency_form
    return {
        "architectures": [DRAFT_ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "block_size": shape.block_size,
        "num_target_layers": last,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "block_size": shape.block_size,
            "num_target_layers": last,
            "target_layer_ids": list(shape.layer_ids) or [last - 1],
        },
        "hyperdflash_config": {
            "source": "layers" if shape.layer_ids else "pre_hc_head",
            "reducer": shape.reducer,
            "gate": "inherited" if shape.reducer == "hc_gate" else "none",
            "hc_mult": target.hc_mult,
            "hc_eps": target.hc_eps,
            "window": shape.window,
            "target": {
                "architecture": target.architecture,
                "hidden_size": target.hidden_size,
                "vocab_size": target.vocab_size,
                "num_hidden_layers": last,
                "hc_head_fingerprint": None if hc_head is None else hc_head.fingerprint(),
            },
            **dependency,
        },
        **(causal_fields(shape.layers) if shape.causal else {}),
    }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rope_frequencies(config: dict[str, Any]) -> torch.Tensor:
    """RoPE's angle of a position, ``[head_dim / 2]`` fp32."""
    dim = config["head_dim"]
    return 1.0 / (config["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [b, heads, n, head_dim]`` by ``cos, sin [b or 1, 1, n, head_dim]``."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + rotated * sin).to(x.dtype)


@cache
def compiled_flex():
    """FlexAttention as one kernel for all shapes; uncompiled it holds every score."""
    return torch.compile(flex_attention, dynamic=True)


def attend(q, k, v, mask: torch.Tensor | BlockMask) -> torch.Tensor:
    """``q [b, heads, n, dim]`` over ``k, v [b, K/V heads, keys, dim]``, with a mask of
    ``anchors.block_mask``.
    """
    if isinstance(mask, BlockMask):
        plain = q.device.type == "cpu" or torch.compiler.is_compiling()  # of the whole layer
        flex = flex_attention if plain else compiled_flex()
        return flex(q, k, v, block_mask=mask, enable_gqa=True)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))


class DraftAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, dim, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = dim
        self.q_proj = nn.Linear(d, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, d, bias=False)
        self.q_norm, self.k_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def _heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.dim)).transpose(1, 2)

    def forward(self, x, context, rope_context, rope_block, mask) -> torch.Tensor:
        """Block rows ``x [b, q, d]`` over ``context [b, S, d]`` and themselves."""
        q = apply_rope(self.q_norm(self._heads(self.q_proj(x), self.heads)), *rope_block)
        keys, values = [], []
        for source, rope in ((context, rope_context), (x, rope_block)):
            k = self.k_norm(self._heads(self.k_proj(source), self.kv_heads))
            keys.append(apply_rope(k, *rope))
            values.append(self._heads(self.v_proj(source), self.kv_heads))
        k, v = torch.cat(keys, dim=2).to(q.dtype), torch.cat(values, dim=2).to(q.dtype)
        return self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, f = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.self_attn, self.mlp = DraftAttention(config), DraftMLP(config)

    def forward(self, x, context, rope_context, rope_block, mask) -> torch.Tensor:
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, context, rope_context, rope_block, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Block drafter; its parameters are named as in the checkpoint."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.raw = raw
        self.config: HyperDFlashConfig = parse_config(raw)
        self.layers = nn.ModuleList(DraftLayer(raw) for _ in range(raw["num_hidden_layers"]))
        self.norm = RMSNorm(raw["hidden_size"], raw["rms_norm_eps"])
        self.hidden_norm = RMSNorm(raw["hidden_size"], raw["rms_norm_eps"])
        self.reducer_name, reducer = build_reducer(self.config)
        setattr(self, self.reducer_name, reducer)
        # Angles of a step's own positions: a table of a million positions would be a GiB.
        self.frequencies = nn.Buffer(rope_frequencies(raw), persistent=False)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        # Last: the other weights of a seed are the same with and without a head.
        self.dependency = build_dependency(self.config)

    def inherit(self, hc_head: HcHead) -> None:
        """Start the gate from the target's ``hc_head``; a no-op for the fc reducer."""
        reducer = getattr(self, self.reducer_name)
        if isinstance(reducer, HCGateReducer):
            reducer.inherit(*hc_head)

    def reduce(self, source: torch.Tensor) -> torch.Tensor:
        """The config's source ``[b, S, width]`` to context features ``[b, S, d]`` (eq. 1)."""
        reducer = getattr(self, self.reducer_name)
        flat = reducer(source.flatten(0, 1), self.hidden_norm.weight)
        return flat.view(*source.shape[:2], -1)

    def forward(
        self,
        context: torch.Tensor,
        block_embeddings: torch.Tensor,
        anchors: torch.Tensor,
        mask: torch.Tensor | BlockMask,
    ) -> torch.Tensor:
        """Draft every block in one pass: hidden states ``[b, n, B, d]`` after the final norm, of
        which row k drafts the token at a+k.

        Args:
            context: ``[b, S, d]`` reduced features; block_embeddings: ``[b, n, B, d]``.
            anchors: ``[b, n]`` positions in their samples; mask: of ``anchors.block_mask``.
        """
        b, n, block = block_embeddings.shape[:3]
        rope_block = self._rope((anchors.unsqueeze(-1) + torch.arange(block)).flatten(1))
        rope_context = self._rope(torch.arange(context.shape[1]).unsqueeze(0))
        x = block_embeddings.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, rope_context, rope_block, mask)
        return self.norm(x).view(b, n, block, -1)

    def candidates(
        self, logits: torch.Tensor, hidden: torch.Tensor, k: int | None = None
    ) -> Candidates:
        """The likeliest tokens of draft rows ``hidden [n, D, d]`` with ``logits [n, D, V]``.

        Args:
            k: how many; None for the K that a dependency head scores, or the first without one.
        """
        head = self.dependency
        if k is None:
            k = 1 if head is None else self.config.candidates
        scores, ids = logits.float().topk(k)
        return Candidates(ids, scores, None if head is None else head.gates(hidden))

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """NeoX cos and sin ``[b, 1, n, head_dim]`` of ``positions [b, n]``, fp32."""
        at = positions.clamp(max=self.raw["max_position_embeddings"] - 1).float()
        angles = (at.unsqueeze(-1) * self.frequencies).unsqueeze(1)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def served_tensors(
        self, weights: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """A copy of the weights as served: bf16 matrices and head, fp32 reducer and norms.

        Args:
            weights: other weights of this drafter than its own, by the names of ``state_dict``.

        Raises:
            HyperDFlashConfigError: a weight is not finite.
        """
        tensors = {}
        for name, tensor in (weights or self.state_dict()).items():
            matrix = "_proj." in name or name.startswith("dependency.")
            dtype = torch.bfloat16 if matrix else torch.float32
            tensors[name] = tensor.to("cpu", dtype, copy=True)
        return dict(checked_tensors(tensors.items(), expected_tensors(self.raw, self.config)))

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint that is served; raises ``WriteFailed``."""
        write_drafter(Path(folder), self.raw, self.served_tensors())

    @classmethod
    def load(cls, folder: str | Path) -> Drafter:
        """Read a checkpoint folder strictly, in fp32.

        Raises:
            HyperDFlashConfigError: its config or a tensor is wrong, or a file is cut short.
        """
        load_config(folder)
        raw = json.loads((Path(folder) / "config.json").read_text())
        drafter, weights = cls(raw), []
        for path in weight_files(Path(folder)):
            try:
                weights += load_file(path).items()
            except SafetensorError as error:
                raise HyperDFlashConfigError(
                    f"{path} is damaged: {error}. Copy or recreate the drafter."
                ) from error
        drafter.load_state_dict(
            dict(checked_tensors(weights, expected_tensors(raw, drafter.config)))
        )
        return drafter


def write_drafter(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint folder, each file atomically; raises ``WriteFailed``."""
    with replacing(folder / "model.safetensors", (OSError, SafetensorError)) as partial:
        save_file(tensors, partial)
    write_json(folder / "config.json", raw, indent=2)
