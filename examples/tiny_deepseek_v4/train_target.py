"""Train the tiny DeepSeek-V4 target with transformers' own ``DeepseekV4ForCausalLM``.

    python examples/tiny_deepseek_v4/train_target.py --data-dir DIR --out target --minutes 60

The state is written to ``--work`` every few minutes; the same command line resumes there. The
result is a ``deepseek_v4`` checkpoint (bf16 matrices, fp32 hyper-connections and norms) plus
``training_log.jsonl`` with the held-out loss of every evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

import corpus

LAYERS, SEQUENCE, BATCH = 5, 256, 16
PEAK_LR, FLOOR_LR, WARMUP_STEPS = 3e-3, 1e-4, 100
CHAT_REPEATS = 2  # the chat text is an eighth of the other two
PORTABLE_ARCHITECTURE = "PortableDeepSeekV4ForCausalLM"


def make_config(tokenizer) -> DeepseekV4Config:
    return DeepseekV4Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        mlp_layer_types=["hash_moe"] + ["moe"] * (LAYERS - 1),
        layer_types=["sliding_attention"] * LAYERS,
        sliding_window=2048,
        max_position_embeddings=2048,
        hc_mult=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def dense_experts(self, hidden_states, top_k_index, top_k_weights):
    """The same sum as the class's loop over hit experts, without data-dependent shapes."""
    weights = torch.zeros(
        hidden_states.shape[0], self.num_experts, dtype=top_k_weights.dtype
    ).scatter_add(1, top_k_index, top_k_weights)
    inner = self._apply_gate(torch.matmul(hidden_states, self.gate_up_proj.transpose(1, 2)))
    inner = inner * weights.t().unsqueeze(-1).to(inner.dtype)
    return torch.matmul(inner, self.down_proj.transpose(1, 2)).sum(0).to(hidden_states.dtype)


def make_model(config: DeepseekV4Config) -> DeepseekV4ForCausalLM:
    DeepseekV4Experts.forward = dense_experts
    model = DeepseekV4ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            table = layer.mlp.gate.tid2eid
            order = torch.rand(table.shape[0], config.n_routed_experts, generator=generator)
            table.copy_(order.argsort(dim=1)[:, : table.shape[1]])
    return model


def encode(tokenizer, documents) -> list[list[int]]:
    texts = [tokenizer.apply_chat_template(item, tokenize=False) for item in documents]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def pack(documents: list[list[int]], order: list[int]) -> torch.Tensor:
    """Concatenate documents and cut rows of ``SEQUENCE + 1`` tokens."""
    flat = torch.tensor([token for i in order for token in documents[i]])
    rows = flat.numel() // (SEQUENCE + 1)
    return flat[: rows * (SEQUENCE + 1)].view(rows, SEQUENCE + 1)


def loss_of(model, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, held_out: dict[str, torch.Tensor]) -> dict[str, float]:
    """Held-out nats per token of each kind, over whole batches (compiled shapes stay fixed)."""
    result = {}
    for kind, rows in held_out.items():
        batches = [rows[i : i + BATCH] for i in range(0, len(rows) - BATCH + 1, BATCH)]
        result[kind] = sum(loss_of(model, batch).item() for batch in batches) / len(batches)
    result["mean"] = sum(result.values()) / len(result)
    return result


def parameter_groups(model) -> list[dict]:
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and "embed" not in name and "hc" not in name
        (decayed if matrix else plain).append(parameter)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def learning_rate(step: int, progress: float) -> float:
    cosine = FLOOR_LR + (PEAK_LR - FLOOR_LR) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, (step + 1) / WARMUP_STEPS)


def export(model, tokenizer, out: Path) -> None:
    """Write the checkpoint: bf16 except what transformers keeps in fp32."""
    keep = tuple(model._keep_in_fp32_modules_strict)
    for name, parameter in model.named_parameters():
        if not any(part in keep for part in name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [PORTABLE_ARCHITECTURE]  # what SGLang goes by
    config["v_head_dim"] = config["head_dim"]  # SGLang's default is DeepSeek-V3's
    path.write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="holds the tokenizer already")
    parser.add_argument("--work", type=Path, default=Path("build/tiny_target"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.work.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(args.out)
    split = corpus.load(args.data_dir)
    documents = [
        tokens
        for kind in corpus.KINDS
        for tokens in encode(tokenizer, split[kind]["train"])
        * (CHAT_REPEATS if kind == "chat" else 1)
    ]
    held_out = {}
    for kind in corpus.KINDS:
        encoded = encode(tokenizer, split[kind]["held_out"])
        rows = pack(encoded, list(range(len(encoded))))
        held_out[kind] = rows.repeat(-(-BATCH // len(rows)), 1) if len(rows) < BATCH else rows

    model = make_model(make_config(tokenizer))
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=True)
    state = {"step": 0, "epoch": 0, "row": 0, "seconds": 0.0}
    snapshot = args.work / "state.pt"
    if snapshot.is_file():
        saved = torch.load(snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
        print(f"resumed at step {state['step']}", flush=True)
    for layer in model.model.layers:
        layer.compile()
    train(model, optimizer, documents, held_out, state, args)
    export(model, tokenizer, args.out)
    print(f"wrote {args.out}", flush=True)


def train(model, optimizer, documents, held_out, state, args) -> None:
    def log(record: dict) -> None:
        with (args.work / "training_log.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)

    def save() -> None:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state},
            args.work / "state.pt.partial",
        )
        (args.work / "state.pt.partial").replace(args.work / "state.pt")

    budget, last_save, losses = args.minutes * 60, state["seconds"], []
    rows = None
    while state["seconds"] < budget:
        started = time.monotonic()
        if rows is None:
            generator = torch.Generator().manual_seed(state["epoch"])
            rows = pack(documents, torch.randperm(len(documents), generator=generator).tolist())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(state["step"], state["seconds"] / budget)
        loss = loss_of(model, rows[state["row"] : state["row"] + BATCH])
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {state['step']}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
        state["row"] += BATCH
        if state["row"] + BATCH > len(rows):
            state.update(row=0, epoch=state["epoch"] + 1)
            rows = None
        state["seconds"] += time.monotonic() - started
        if state["step"] % 50 == 0 or state["seconds"] >= budget:
            record = {"step": state["step"], "minutes": round(state["seconds"] / 60, 2)}
            record["train_loss"] = sum(losses) / len(losses)
            losses.clear()
            if state["step"] % 250 == 0 or state["seconds"] >= budget:
                record["held_out"] = evaluate(model, held_out)
            log(record)
        if state["seconds"] - last_save > 180 or state["seconds"] >= budget:
            save()
            last_save = state["seconds"]


if __name__ == "__main__":
    main()
