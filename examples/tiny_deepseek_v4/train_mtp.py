"""Train the tiny target's NextN (MTP) layer, which ``EAGLE`` serves for comparison.

From a checkout, with ``PYTHONPATH=.``:

    python examples/tiny_deepseek_v4/train_mtp.py --answers build/study/answers --out mtp

Depth one, as DeepSeek-V4 trains its own: row p reads the target's residual at p and the token at
p+1, and predicts the token at p+2. CE plus ``ALPHA`` KL to the target's distribution, on answer
tokens only. Writes the checkpoint and a log line every ``EVERY`` steps.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from eval.rivals.nextn_core import NEXTN_PREFIX, NextNCore
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.losses import row_losses
from sglang_hyperdflash.training.samples import FeatureCache, Passes, Source, collate

TARGET = Path(__file__).resolve().parent / "target"
MAX_LENGTH = 256  # of a conversation, as in drafter.toml
ALPHA, LR, WARMUP_STEPS, EVERY = 0.15, 1e-3, 50, 400


def new_layer(target: LocalTarget, target_folder: Path, folder: Path) -> NextNCore:
    """A layer that starts from the target's last one; ``folder`` receives its ``config.json``."""
    raw = json.loads((target_folder / "config.json").read_text())
    raw |= {"architectures": ["PortableDeepSeekV4ForCausalLMNextN"], "num_hidden_layers": 1}
    raw |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    core = NextNCore(AutoConfig.from_pretrained(folder))
    core.layer.load_state_dict(target.core.layers[-1].state_dict())
    with torch.no_grad():
        for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm"):
            getattr(core, name).copy_(getattr(target.core, name))
    # Start as the target's own residual with a little of the new token.
    nn.init.eye_(core.h_proj.weight)
    nn.init.normal_(core.e_proj.weight, std=0.02)
    return core.train()


def losses(
    core: NextNCore, target: LocalTarget, source: Source, indices: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of some samples and the share of correct answer tokens."""
    rows, states = (
        collate([source.samples[i] for i in indices]),
        source.states(indices).to(target.device),
    )
    b, n = rows.tokens.shape[0], rows.tokens.shape[1] - 1
    after = rows.tokens[:, 1:].reshape(-1)
    attend = target.new_cache(b, n).attend(torch.zeros(b, dtype=torch.long), n, target.scaling)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings, residual = target.embed_tokens(after), states.residual[:, :-1].flatten(0, 1)
        hidden, _ = core(embeddings, residual, after, torch.arange(n).repeat(b), attend)
    # Row p gives token p+2; drafting starts after an answer token or the prompt's last.
    wanted = rows.loss_mask[:, 2:]
    ce, kl, hits, _ = row_losses(
        hidden.view(b, n, -1)[:, :-1][wanted].float(),
        rows.tokens[:, 2:][wanted],
        target.lm_head,
        early=torch.ones(int(wanted.sum()), dtype=torch.bool),
        teacher=target.final(states.residual[:, 1:-1][wanted]),
        temperature=1.0,
    )
    return ce.mean() + ALPHA * kl.mean(), hits.float().mean()


def train(
    core: NextNCore, target: LocalTarget, source: Source, *, steps: int, batch: int
) -> Iterator[float]:
    """Yield the loss of each optimizer step.

    Raises:
        RuntimeError: a gradient is not finite.
    """
    parameters = [p for p in core.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

    def rate(step: int) -> float:
        """Linear warm-up times a cosine to a hundredth."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps))
        return cosine * min(1.0, (step + 1) / WARMUP_STEPS)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    passes = Passes(len(source.samples), batch, seed=0)
    for step in range(steps):
        loss, _ = losses(core, target, source, passes.batch(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        yield loss.item()


def checkpoint_tensors(core: NextNCore) -> Iterator[tuple[str, torch.Tensor]]:
    """The layer's tensors as ``mtp.0.*``, experts and shared expert under transformers' names."""
    for name, tensor in core.state_dict().items():
        name = NEXTN_PREFIX + name.removeprefix("layer.")
        parent, _, last = name.rpartition(".")
        if last == "gate_up":
            gate, up = tensor[-1].chunk(2)
            yield f"{parent}.experts.gate_up_proj", tensor[:-1]
            yield f"{parent}.shared_experts.gate_proj.weight", gate
            yield f"{parent}.shared_experts.up_proj.weight", up
        elif last == "down":
            yield f"{parent}.experts.down_proj", tensor[:-1].transpose(1, 2)
            yield f"{parent}.shared_experts.down_proj.weight", tensor[-1].T
        elif last == "router":
            yield f"{parent}.gate.weight", tensor
        elif last == "bias":
            yield f"{parent}.gate.e_score_correction_bias", tensor
        elif last == "o_a_proj":
            yield f"{name}.weight", tensor.flatten(0, 1)
        else:
            yield f"{name}.weight" if last.endswith("norm") else name, tensor


def save(core: NextNCore, folder: Path) -> None:
    """Write the served checkpoint: bf16 matrices, fp32 hyper-connections, norms and sinks."""
    tensors = {}
    for name, tensor in checkpoint_tensors(core):
        matrix = tensor.dim() >= 2 and "hc" not in name
        tensors[name] = tensor.to(torch.bfloat16 if matrix else torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help="of own_answers.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    chats, target = load_chats(str(TARGET)), LocalTarget(TARGET)

    def cache(*paths: Path) -> FeatureCache:
        return FeatureCache(target, load_samples(paths, chats, MAX_LENGTH).samples)

    @torch.no_grad()
    def accuracy(source: FeatureCache) -> float:
        return losses(core, target, source, list(range(len(source.samples))))[1].item()

    core = new_layer(target, TARGET, args.out)
    held_out = {
        path.stem.removeprefix("held_out_"): cache(path)
        for path in sorted(args.answers.glob("held_out_*.jsonl"))
    }
    source = cache(args.answers / "greedy.jsonl", args.answers / "sampled.jsonl")
    recent: list[float] = []
    for step, loss in enumerate(train(core, target, source, steps=args.steps, batch=args.batch), 1):
        recent.append(loss)
        if step % EVERY and step < args.steps:
            continue
        record = {"step": step, "loss": mean(recent)}
        record["held_out"] = {name: round(accuracy(part), 4) for name, part in held_out.items()}
        recent.clear()
        save(core, args.out)
        with (args.out / "training_log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
