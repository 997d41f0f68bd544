"""A byte-level tokenizer of any size, with a ChatML template, and a synthetic model's small files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgemoe.bench.synthetic.workload import Shape
from edgemoe.errors import UserError

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def vocabulary(size: int) -> tuple[list[str], frozenset[str]]:
    """Makes exactly `size` byte-level tokens in the order of their ids, and the set of special ones.

    Tokens above the 256 bytes are words that encoding never produces: every answer of a random model can be decoded.

    Raises:
        UserError: `size` is below the number of bytes and special tokens.
    """
    from tokenizers import pre_tokenizers

    known = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if size < len(known):
        raise UserError(f"a vocabulary of {len(known)} tokens or more", str(size), "raise --vocab")
    return [*known, *(f"Ġword{i}" for i in range(size - len(known)))], frozenset(SPECIAL)


def save_tokenizer(vocab: int, directory: Path) -> None:
    """Writes a byte-level tokenizer of vocabulary(vocab) with a ChatML template, as transformers saves it.

    Raises:
        UserError: `vocab` is below the number of bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, _ = vocabulary(vocab)
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL),
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


@contextmanager
def companions(shape: Shape) -> Iterator[list[Path]]:
    """Yields a model's configuration and tokenizer as files of a temporary folder, sorted by name.

    Raises:
        UserError: the vocabulary is below the number of bytes and special tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape.config().save_pretrained(folder)
        save_tokenizer(shape.vocab, Path(folder))
        yield sorted(Path(folder).iterdir())
