"""The rivals on the portable target answer as the baseline, and draft as plain torch decoders.

A comparison with a rival that is served wrongly would be worth nothing. With the plugins installed,
SGLang's DFLASH runs on a plain target as before.
"""

from functools import partial

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from eval import rivals
from eval.algorithm import decode
from eval.methods import resolve
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, greedy, greedy_all, ids
from tests.engine.drafters import assert_lengths_vary
from tests.engine.reference_decoder import block_draft, chain_draft

pytestmark = pytest.mark.slow
# Prompts and tokens of the plain decoder, which rereads its prefix for every draft of a chain.
COMPARED, COMPARED_TOKENS = 3, 36
NAMES = ("mtp3", "mtp6", "dflash6", "dflash2-style", "dspark-style", "hyperdflash6")
# The committed drafts.
FOLDERS = {
    "mtp": EXAMPLE / "mtp",
    "dflash": EXAMPLE / "dflash",
    "dspark_style": EXAMPLE / "dspark_style",
    "dflash2_style": EXAMPLE / "dflash2_style",
    "hyperdflash": EXAMPLE / "hyperdflash",
    "hyperdflash2": EXAMPLE / "drafter",
}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_and_tau(servers, target_dir, own_prompts, own_reference, name):
    """Histograms of single requests, entry by entry: so tau and every position's acceptance."""
    drafts = {f"{kind}_draft": str(path) for kind, path in FOLDERS.items()}
    (_, method) = resolve(["baseline", name], drafts, {})
    environment = rivals.environment(method.arguments) | dict(method.environment)
    server = servers.get(name, target_dir, *FP32, *method.arguments, environment=environment)
    answers = greedy_all(server, own_prompts, 8)
    assert ids(answers) == own_reference
    alone = [greedy(server, prompt, COMPARED_TOKENS) for prompt in own_prompts[:COMPARED]]
    servers.stop(name)
    steps = int(name[3:]) if name.startswith("mtp") else 0
    folder, target = FOLDERS[name.replace("-", "_").rstrip("36")], LocalTarget(target_dir)
    draft = chain_draft(target, folder, steps) if steps else block_draft(target, folder)
    assert_lengths_vary([counters(answer["meta_info"])[2] for answer in alone])
    for prompt, answer in zip(own_prompts, alone, strict=False):
        expected, histogram = decode(target, draft, prompt, COMPARED_TOKENS, None)
        assert answer["output_ids"] == expected
        correct, rounds, found = counters(answer["meta_info"])
        assert found + [0] * (len(histogram) - len(found)) == histogram
        assert (rounds, correct) == (sum(histogram), sum(i * n for i, n in enumerate(histogram)))


SIZES = {"vocab_size": 1363, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


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
    arguments += (str(EXAMPLE / "dflash"), *FP32)
    environment = rivals.environment(arguments)
    server = servers.get("qwen3-dflash", tmp_path, *arguments, environment=environment)
    found = greedy_all(server, prompts.tolist(), 3, partial(greedy, max_new_tokens=48))
    assert ids(found) == whole[:, prompts.shape[1] :].tolist()
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in found)
    # Our request check leaves SGLang's own algorithm alone.
    sampling = {"max_new_tokens": 4, "frequency_penalty": 0.5}
    penalised = server.generate(input_ids=prompts[0].tolist(), sampling_params=sampling)
    assert len(penalised["output_ids"]) == 4
    servers.stop("qwen3-dflash")
