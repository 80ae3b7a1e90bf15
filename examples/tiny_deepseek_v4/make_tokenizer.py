"""Train the tiny target's byte-level BPE on training exchanges, and save it.

    python examples/tiny_deepseek_v4/make_tokenizer.py --out target

Digits are single tokens, and so are all words of the exchanges.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from exchanges import stream

BOS, EOS, USER, ASSISTANT, MASK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜mask｜>",
)
VOCAB_SIZE = 1536  # an upper bound: the exchanges have fewer words
EXCHANGES = 40_000
SEED = 999  # a training seed that no training run uses
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '" + USER + "' + message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def training_text() -> Iterator[str]:
    for exchange in islice(stream(SEED), EXCHANGES):
        for message in exchange.messages:
            yield message["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, USER, ASSISTANT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, mask_token=MASK
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(args.out)
    print(f"saved a tokenizer of {len(fast)} tokens to {args.out}")


if __name__ == "__main__":
    main()
