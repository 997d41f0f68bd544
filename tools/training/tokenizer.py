"""The demo model's tokenizer: byte-level BPE with digits apart, and a plain chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

END_OF_TEXT, USER, SYSTEM, ASSISTANT, END = SPECIAL = (
    "<|endoftext|>",
    "<|user|>",
    "<|system|>",
    "<|assistant|>",
    "<|end|>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> Any:
    """Trains a tokenizer.

    Args:
        texts: texts to learn merges from.
        vocabulary: maximum tokens, special ones included; fewer if the texts have no more pairs.
        context: maximum tokens that the model reads.

    Returns:
        a PreTrainedTokenizerFast whose end-of-sequence token closes a chat message.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A run of spaces is one token: otherwise Python's indentation costs one token per column.
            pre_tokenizers.Split(Regex(r"\d|\n+| +(?= )"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        eos_token=END,
        additional_special_tokens=[USER, SYSTEM, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
