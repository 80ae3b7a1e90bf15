"""The folder of a DeepSeek-V4 as it is published, as far as conversations need it: no template."""

import json
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer

# Added tokens of DeepSeek-V4's tokenizer that the tiny target's does not have.
TOKENS = ("<think>", "</think>", "｜DSML｜", "<｜System｜>")
CONFIG = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}


def published_v4(folder: Path, target: Path, config: dict = CONFIG) -> Path:
    """Write the tiny target's tokenizer with those tokens and without its template."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
