"""With the plugin installed, other algorithms run as before: SGLang's DFLASH on a plain target."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, greedy, greedy_all, ids

SIZES = {"vocab_size": 1363, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.mark.slow
def test_sglangs_own_dflash_answers_as_transformers_does(servers, tokenizer, tmp_path):
    """A random Qwen3 of the sizes that the committed DFlash draft reads."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, max_position_embeddings=2048, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = torch.randint(5, SIZES["vocab_size"], (6, 20))
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 0}
    whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    arguments = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path")
    server = servers.get("qwen3-dflash", tmp_path, *FP32, *arguments, str(EXAMPLE / "dflash"))
    found = greedy_all(server, prompts.tolist(), 3, partial(greedy, max_new_tokens=48))
    assert ids(found) == whole[:, prompts.shape[1] :].tolist()
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in found)
    # Our request check leaves SGLang's own algorithm alone.
    sampling = {"max_new_tokens": 4, "frequency_penalty": 0.5}
    penalised = server.generate(input_ids=prompts[0].tolist(), sampling_params=sampling)
    assert len(penalised["output_ids"]) == 4
    servers.stop("qwen3-dflash")
