"""SGLang's own HY-V4 on a CPU, in a process of its own (it builds rank groups).

Attention and experts need CUDA kernels: a linear layer stands in for attention, and every MLP is
dense. The streams, the boundaries between layers, the collapse, the norm and the logits processor
are SGLang's.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from tests.conftest import EXAMPLE
from tests.unit.other_process import answer, ask, question

D, M, VOCAB = 32, 4, 128
MODES = ("decode", "extend", "target_verify", "idle")
ROWS = {"decode": 4, "extend": 5, "target_verify": 6, "idle": 0}


class LinearAttention(nn.Module):
    """In the place of an attention layer; token by token."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D, bias=False)

    def prepare_qkv_latent(self, *args, **kwargs) -> None:
        return None

    def forward(self, positions=None, hidden_states=None, *args, **kwargs):
        return self.proj(hidden_states)


@contextmanager
def one_rank():
    """SGLang's process-wide state for one rank on a CPU."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ServerArgs(model_path=str(EXAMPLE / "target"), dtype="float32")
    args.resolve_once()
    with use_context(create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0))):
        method = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(1, 0, method, 0, "gloo")
        initialize_model_parallel(backend="gloo")
        initialize_dp_attention(args)
        yield


def hy_v4(folder: str) -> nn.Module:
    from sglang.srt.models import hunyuan_v4
    from sglang.srt.utils.hf_transformers_utils import get_config

    hunyuan_v4.HYV4Attention = LinearAttention
    config = get_config(folder, trust_remote_code=False)
    config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    return hunyuan_v4.HYV4ForCausalLM(config)


def batch(mode: str):
    """Tokens of one step, others and another number in each mode; two requests in an extend."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    n = ROWS[mode]
    lengths = {"decode": [1] * n, "extend": [2, 3], "target_verify": [3, 3], "idle": []}[mode]
    found = ForwardBatch(
        forward_mode=ForwardMode[mode.upper()],
        batch_size=len(lengths),
        input_ids=torch.arange(n) + 10 * n,
        req_pool_indices=torch.arange(len(lengths)),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        out_cache_loc=torch.arange(n),
        seq_lens_sum=n,
        positions=torch.arange(n),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    if mode == "extend":
        found.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32)
        found.extend_seq_lens_cpu = lengths
    return found


def step(model: nn.Module, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden states of one step."""
    forward = batch(mode)
    found = model.forward(forward.input_ids, forward.positions, forward)
    return found.next_token_logits, found.hidden_states


def examine(folder: str) -> dict[str, object]:
    """What an exposed model returns, beside what it returned before."""
    from types import SimpleNamespace

    from sglang_hyperdflash.targets.loaded import expose_residual, target_hc_head

    torch.manual_seed(0)
    model = hy_v4(folder)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    before = {mode: step(model, mode) for mode in MODES}
    aux = SimpleNamespace(dflash_use_aux_hidden_state=False)
    runner = SimpleNamespace(
        model=model, is_draft_worker=False, spec_algorithm="EAGLE", spec_aux_config=aux
    )
    expose_residual(None, runner)
    untouched = "forward" not in vars(model.model)
    runner.spec_algorithm = "HYPERDFLASH"
    expose_residual(None, runner)
    found: dict[str, object] = {"untouched": untouched, "modes": {}}
    for mode in MODES:
        logits, residual = step(model, mode)
        found["modes"][mode] = {
            "logits": torch.equal(logits, before[mode][0]),
            "before": list(before[mode][1].shape),
            "shape": list(residual.shape),
        }
        if len(residual):
            found["modes"][mode] |= compare(model, residual, before[mode][1])
    found["embeddings"] = model.get_input_embeddings() is model.model.embed_tokens
    found["hc_head"] = target_hc_head(model) is not None
    return found | replay(model)


def replay(model: nn.Module) -> dict[str, object]:
    """As a prefill graph does: the body's ``forward`` replaced by what it returned once."""
    body, own = batch("decode"), model.model.forward
    pair = own(body.input_ids, body.positions, body)
    model.model.forward = lambda *args, **kwargs: pair
    residual = step(model, "decode")[1]
    model.model.forward = own
    expected = step(model, "decode")[1]
    return {
        "body": [list(part.shape) for part in pair],
        "replayed": torch.equal(residual, pair[1]) and torch.equal(residual, expected),
    }


def compare(model: nn.Module, residual: torch.Tensor, final: torch.Tensor) -> dict[str, float]:
    """How far the reducer's formula of the residual, and the norm, are from the final states."""
    from sglang_hyperdflash.targets.loaded import target_hc_head
    from triton_ops import hc_gate_reduce_reference

    config, gate = model.config, target_hc_head(model)
    eps = {"rms_eps": config.rms_norm_eps, "hc_eps": config.hc_eps}
    y = hc_gate_reduce_reference(residual, *gate, None, None, **eps)
    norm = torch.nn.functional.rms_norm(y, (D,), model.model.norm.weight, config.rms_norm_eps)
    paths = residual.unflatten(-1, (M, D))
    return {
        "error": ((norm - final).norm() / final.norm()).item(),
        # Paths that were all alike would make any gate look right.
        "spread": (paths.std(1).norm() / paths.norm()).item(),
    }


def main() -> None:
    """Examine the model of the folder on stdin."""
    from sglang_hyperdflash import plugin

    plugin.load()
    folder = question()
    with one_rank(), torch.no_grad():
        answer(examine(folder))


def examined(folder: Path) -> dict[str, object]:
    """:func:`examine` of a folder, in a new process."""
    return ask("tests.unit.targets.exposed_models", str(folder))


if __name__ == "__main__":
    main()
