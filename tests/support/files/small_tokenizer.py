"""A byte-level tokenizer of 300 tokens, and its chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_bpe(text: str, size: int) -> Tokenizer:
    """Byte-level BPE of at most `size` tokens: the bytes, three special tokens, and merges of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 2, trainer)
    return tokenizer


def a_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 tokens: the bytes, three special tokens, and merges of one sentence."""
    text = "the quick brown fox jumps over the lazy dog while another one thinks about it"
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(text, 300),
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
    )
