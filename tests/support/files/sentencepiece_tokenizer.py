"""A tokenizer like Mixtral's: spaces as ▁, one before each text, and bytes for what has no token."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

WORDS = ("▁Hello", "▁world", "▁and", "▁▁▁▁", "return", "!", "\n")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Ids: <unk>, <s>, </s>, 256 bytes, then WORDS and the letters and prefixes that make them."""
    vocab = {w: i for i, w in enumerate(("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))))}
    merges = []
    for word in WORDS:
        for letter in word:
            vocab.setdefault(letter, len(vocab))
        for i in range(1, len(word)):
            vocab.setdefault(word[: i + 1], len(vocab))
            if (pair := (word[:i], word[i])) not in merges:
                merges.append(pair)
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
