"""Training of a NextN (MTP) layer for the portable target, served by ``EAGLE`` for comparison.

Depth one, as DeepSeek-V4 trains its own: row p reads the target's residual at p and the token at
p+1, and predicts the token at p+2. CE plus alpha KL to the target's own distribution, on answer
tokens only. Layer, ``hc_head`` and final norm start as copies of the target's last ones.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from cpu_rivals.nextn_core import NextNCore
from sglang_hyperdflash.portable.core import softmax_with_sinks
from sglang_hyperdflash.portable.weights import NEXTN_PREFIX
from sglang_hyperdflash.tools.atomic import replacing
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.losses import row_losses
from sglang_hyperdflash.training.samples import Passes, Source, collate

ARCHITECTURE = "PortableDeepSeekV4ForCausalLMNextN"


def causal_attend(batch: int, n: int, scaling: float):
    """A differentiable ``Attend`` over ``batch`` rows of ``n`` tokens, with sinks."""
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)

    def attend(_layer: int, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor):
        heads, d = q.shape[1:]
        keys = kv.view(batch, 1, n, d)
        q = q.view(batch, n, heads, d).transpose(1, 2)
        scores = (q @ keys.transpose(2, 3) * scaling).float().masked_fill(hidden, float("-inf"))
        weights = softmax_with_sinks(scores, sinks).to(keys.dtype)
        return (weights @ keys).transpose(1, 2).reshape(batch * n, heads, d)

    return attend


def nextn_config(target_config: dict) -> dict:
    """The draft's ``config.json``: the target's, with one routed layer."""
    raw = copy.deepcopy(target_config)
    raw |= {"architectures": [ARCHITECTURE], "num_hidden_layers": 1}
    raw |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    return raw


def new_nextn(target: LocalTarget, raw: dict, folder: Path) -> NextNCore:
    """A layer that starts from the target's last one; ``folder`` receives ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    core = NextNCore(AutoConfig.from_pretrained(folder))
    core.layer.load_state_dict(target.core.layers[-1].state_dict())
    with torch.no_grad():
        for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm"):
            getattr(core, name).copy_(getattr(target.core, name))
        # Start as the target's own residual with a little of the new token.
        core.h_proj.weight.copy_(torch.eye(len(core.h_proj.weight)))
        nn.init.normal_(core.e_proj.weight, std=0.02)
    return core.train()


class NextNTrainer:
    """Steps over a source of target states; one process.

    Args:
        source: samples and states; steps: length of the schedule, in optimizer steps.
    """

    def __init__(
        self,
        core: NextNCore,
        target: LocalTarget,
        source: Source,
        *,
        steps: int,
        batch: int = 8,
        lr: float = 1e-3,
        alpha: float = 0.15,
        seed: int = 0,
    ) -> None:
        self.core, self.target, self.source = core, target, source
        self.steps, self.lr, self.alpha = steps, lr, alpha
        self.passes = Passes(len(source.samples), batch, seed)
        parameters = [p for p in core.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.done = 0

    def losses(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of some samples and the share of correct answer tokens."""
        rows = collate([self.source.samples[i] for i in indices])
        states = self.source.states(indices)
        tokens, answer = rows.tokens, rows.loss_mask
        b, n = tokens.shape[0], tokens.shape[1] - 1
        after = tokens[:, 1:].reshape(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = self.core(
                self.target.embed_tokens(after),
                states.residual[:, :-1].reshape(b * n, -1),
                after,
                torch.arange(n).repeat(b),
                causal_attend(b, n, self.target.scaling),
            )
        # Row p gives token p+2; drafting starts after an answer token or the prompt's last.
        wanted = answer[:, 2:]
        hidden = hidden.view(b, n, -1)[:, :-1][wanted].float()
        labels, teacher = tokens[:, 2:][wanted], states.final[:, 1:-1][wanted]
        every = torch.ones_like(labels, dtype=torch.bool)
        ce, kl, hits, _ = row_losses(
            hidden,
            labels,
            self.target.lm_head,
            early=every,
            teacher=teacher,
            temperature=1.0,
            chunk=2048,
        )
        return ce.mean() + self.alpha * kl.mean(), hits.float().mean()

    def step(self) -> tuple[float, float]:
        """One optimizer step: loss and accuracy.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        share = self.done / self.steps
        for group in self.optimizer.param_groups:
            cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share))
            group["lr"] = self.lr * cosine * min(1.0, (self.done + 1) / 50)
        loss, accuracy = self.losses(self.passes.batch(self.done))
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.done}.")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.core.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        return loss.item(), accuracy.item()


def checkpoint_tensors(core: NextNCore) -> Iterator[tuple[str, torch.Tensor]]:
    """The layer's tensors as ``mtp.0.*``, experts and shared expert under transformers' names."""
    for name, tensor in core.state_dict().items():
        name = NEXTN_PREFIX + name.removeprefix("layer.")
        mlp = name.rsplit(".", 1)[0]
        if name.endswith(".mlp.gate_up"):
            f = tensor.shape[1] // 2
            yield f"{mlp}.experts.gate_up_proj", tensor[:-1]
            yield f"{mlp}.shared_experts.gate_proj.weight", tensor[-1, :f]
            yield f"{mlp}.shared_experts.up_proj.weight", tensor[-1, f:]
        elif name.endswith(".mlp.down"):
            yield f"{mlp}.experts.down_proj", tensor[:-1].transpose(1, 2)
            yield f"{mlp}.shared_experts.down_proj.weight", tensor[-1].T
        elif name.endswith(".mlp.router"):
            yield f"{mlp}.gate.weight", tensor
        elif name.endswith(".mlp.bias"):
            yield f"{mlp}.gate.e_score_correction_bias", tensor
        elif name.endswith("o_a_proj"):
            yield f"{name}.weight", tensor.flatten(0, 1)
        elif name.endswith("norm"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor


def save(core: NextNCore, folder: Path) -> None:
    """Write the served checkpoint: bf16 matrices, fp32 hyper-connections, norms and sinks."""
    tensors = {}
    for name, tensor in checkpoint_tensors(core):
        matrix = tensor.dim() >= 2 and "hc" not in name
        kept = torch.bfloat16 if matrix else torch.float32
        tensors[name] = tensor.detach().to(kept).contiguous()
    with replacing(folder / "model.safetensors", (OSError, SafetensorError)) as partial:
        save_file(tensors, partial)
