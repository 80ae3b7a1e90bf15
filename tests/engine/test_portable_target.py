"""The portable target inside the engine: logits and residual equal the core's, fp32.

``tests/unit/cpu_engine/portable/test_core.py`` compares the core with transformers' own class, so
the chain engine - core - transformers is closed.
"""

from __future__ import annotations

import torch

from sglang_hyperdflash.training.local_target import LocalTarget
from tests.engine.conftest import greedy


def test_logits_and_residual_through_paged_attention(target_server, target_dir, own_prompts):
    target = LocalTarget(target_dir)
    for prompt in own_prompts[::4]:
        answer = greedy(
            target_server,
            prompt,
            12,
            return_hidden_states=True,
            return_logprob=True,
            logprob_start_len=0,
        )
        tokens = prompt + answer["output_ids"]
        final, residual, _ = target.features(torch.tensor([tokens]))
        logprobs = target.lm_head(final)[0].log_softmax(-1)
        meta = answer["meta_info"]
        for position, (value, token, *_) in enumerate(meta["input_token_logprobs"]):
            if position:
                assert abs(value - float(logprobs[position - 1, token])) < 1e-4
        for k, (value, token, *_) in enumerate(meta["output_token_logprobs"]):
            assert abs(value - float(logprobs[len(prompt) + k - 1, token])) < 1e-4
        prefill, *steps = meta["hidden_states"]
        rows = torch.tensor(prefill).view(-1, residual.shape[-1])
        rows = torch.cat([rows, *[torch.tensor(step).view(1, -1) for step in steps]])
        expected = residual[0, len(tokens) - 1 - len(rows) : len(tokens) - 1]
        assert len(rows) > 11
        assert (rows - expected).abs().max() < 1e-4 * float(expected.abs().max())
