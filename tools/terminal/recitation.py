"""A checkpoint of a small model that gives the same answer to every prompt: a model whose text is known.

Every piece of the answer is one token, which occurs once. Attention and experts add nothing, and the head maps the
embedding of a token to the piece after it, so that the answer needs no training.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

BEGIN, END = "<|answer|>", "<|end|>"
"""Tokens before and after an answer."""

_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}" + BEGIN
_HIDDEN = 256
_SCALE = 16.0
"""Scale of the head: a piece's logit is far above all others."""


def write_recitation(directory: Path, answer: str) -> None:
    """Writes the checkpoint, with a tokenizer and a chat template.

    Args:
        directory: is created.
        answer: the answer of the model.
    """
    pieces = pieces_of(answer.strip())
    tokenizer = _tokenizer(pieces)
    ids = tokenizer.convert_tokens_to_ids([BEGIN, *map(_byte_level, pieces), END])
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=32_768,
        eos_token_id=ids[-1],
        pad_token_id=ids[-1],
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                weight.zero_()
        head = torch.zeros_like(model.lm_head.weight)
        for token, following in itertools.pairwise(ids):
            embedding = model.model.embed_tokens.weight[token]
            head[following] = embedding / embedding.norm() * _SCALE
        model.lm_head.weight.copy_(head)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def pieces_of(text: str) -> list[str]:
    """Splits a text into words, each of them with the blanks after it; a word that has occurred goes to the next one.

    >>> pieces_of("- a\\n- b\\n")
    ['- ', 'a\\n', '- b\\n']
    """
    pieces: list[str] = []
    held = ""
    for word in re.findall(r"\S+\s*", text):
        held += word
        if held not in pieces:
            pieces.append(held)
            held = ""
    if held:
        pieces[-1] += held
    return pieces


def _tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Bytes, the pieces and the two tokens around an answer; a prompt becomes bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [BEGIN, END, *alphabet, *(p for p in map(_byte_level, pieces) if p not in alphabet)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=_TEMPLATE
    )


def _byte_level(text: str) -> str:
    """A text in the alphabet of byte-level tokens."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(part for part, _ in split)
