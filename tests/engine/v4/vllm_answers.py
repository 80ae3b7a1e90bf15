"""vLLM's own DeepSeek-V4 on a CPU: logits and residual of a given text.

The interpreter of vLLM's own environment runs it (``V4_VLLM_PYTHON``); it imports nothing of this
repository:

    python vllm_answers.py TARGET QUESTION.json ANSWER.pt

The question has ``tokens`` and how many of them are ``decoded``, one at a time after the prefill of
the others. Model class, CPU kernels, caches, metadata and scheduler stay vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # the metadata's kernels; vLLM expects triton-cpu for them
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is reached in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PAGES = 2**28  # bytes of K/V cache
MOST_TOKENS = 4096


def triton_on_a_cpu() -> None:
    """vLLM looks for a backend of this name before it uses Triton at all."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None)


def complete_tile_schedules() -> None:
    """vLLM 0.32's CPU builder leaves out two kinds of layer that its caller reads."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    own = Builder.build_tile_scheduler

    def completed(self, num_decode_tokens: int) -> dict:
        return {"c1a": None, "c2a": None} | own(self, num_decode_tokens)

    Builder.build_tile_scheduler = completed


class Recorder:
    """Keeps every row that the model computes, and makes it choose the given tokens."""

    def __init__(self, model, tokens: list[int]) -> None:
        self.tokens, self.last = tokens, -1
        self.logits, self.residual, self.computed = [], [], []
        self.own_forward, self.own_logits = model.forward, model.compute_logits
        model.forward, model.compute_logits = self.forward, self.chosen
        model.model.hc_head_op.register_forward_pre_hook(
            lambda _module, inputs: self.residual.append(inputs[0].float().clone())
        )

    def forward(self, input_ids, positions, *args, **kwargs):
        hidden = self.own_forward(input_ids, positions, *args, **kwargs)
        self.logits.append(self.own_logits(hidden).float())
        self.computed += zip(positions.tolist(), input_ids.tolist(), strict=True)
        self.last = int(positions[-1])
        return hidden

    def chosen(self, hidden):
        """Logits whose largest is the text's next token, ``[1, V]``."""
        logits = self.own_logits(hidden).zero_()
        logits[:, self.tokens[min(self.last + 1, len(self.tokens) - 1)]] = 1
        return logits


def answer(target: Path, tokens: list[int], decoded: int) -> dict:
    """Logits ``[S, V]`` and residual ``[S, m, d]`` of all ``S`` tokens, both fp32."""
    import torch
    from vllm import LLM, SamplingParams

    complete_tile_schedules()
    llm = LLM(
        model=str(target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        kv_cache_memory_bytes=PAGES,
        enforce_eager=True,
        max_model_len=MOST_TOKENS,
        max_num_batched_tokens=MOST_TOKENS,
        max_num_seqs=1,
        async_scheduling=False,
    )
    recorders = llm.apply_model(lambda model: Recorder(model, tokens))
    llm.generate(
        [{"prompt_token_ids": tokens[: len(tokens) - decoded]}],
        SamplingParams(temperature=0, max_tokens=decoded + 1, ignore_eos=True, detokenize=False),
    )
    found = recorders[0]
    assert found.computed == list(enumerate(tokens)), "other tokens than asked"
    return {"logits": torch.cat(found.logits), "residual": torch.cat(found.residual)}


def main(target: str, question: str, out: str) -> None:
    os.environ.update(ENVIRONMENT)
    triton_on_a_cpu()
    import torch

    asked = json.loads(Path(question).read_text())
    torch.save(answer(Path(target), asked["tokens"], asked["decoded"]), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
