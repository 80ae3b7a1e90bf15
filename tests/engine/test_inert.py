"""With the plugin installed, other algorithms run as before: SGLang's DFLASH on a plain target."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_hyperdflash.training.drafter import Drafter
from tests.engine.conftest import FP32, greedy, greedy_all, ids


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, tokenizer):
    """A random Qwen3 target, and an in-tree DFLASH draft of random weights for it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    target = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def dflash_draft(tmp_path_factory, drafter_dir):
    """The committed drafter's layers under DFLASH's own architecture, with a random fc."""
    raw = json.loads((drafter_dir / "config.json").read_text())
    raw |= {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    raw |= {"max_position_embeddings": 512, "num_target_layers": 4}
    raw["dflash_config"] |= {"num_target_layers": 4, "target_layer_ids": [1, 2]}
    raw["hyperdflash_config"]["target"] |= {"hidden_size": 128}
    torch.manual_seed(1)
    weights = {
        name: tensor
        for name, tensor in Drafter(raw).state_dict().items()
        if not name.startswith("reducer.")
    }
    weights["fc.weight"] = torch.randn(128, 256) * 0.05
    raw["architectures"] = ["DFlashDraftModel"]
    del raw["hyperdflash_config"]
    folder = tmp_path_factory.mktemp("dflash")
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_sglangs_own_dflash_answers_as_transformers_does(servers, qwen3, dflash_draft):
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(5, 2048, (6, 20), generator=generator)
    model = Qwen3ForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 0}
    whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    arguments = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path")
    server = servers.get("qwen3-dflash", qwen3, *FP32, *arguments, dflash_draft)
    found = greedy_all(server, prompts.tolist(), 3, partial(greedy, max_new_tokens=48))
    assert ids(found) == whole[:, prompts.shape[1] :].tolist()
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in found)
    # Our request check leaves SGLang's own algorithm alone.
    sampling = {"max_new_tokens": 4, "frequency_penalty": 0.5}
    penalised = server.generate(input_ids=prompts[0].tolist(), sampling_params=sampling)
    assert len(penalised["output_ids"]) == 4
    servers.stop("qwen3-dflash")
