"""The tokenizer and chat template of a GGUF file, written out as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.errors import ModelRefused
from storage.untrusted import shortened

_TEMPLATE = "tokenizer.chat_template"


def unpack_tokenizer(path: Path, fields: Mapping[str, Any], into: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja.

    Args:
        path: of the GGUF file, whose header was found good.
        fields: of that header.
        into: a directory.

    Raises:
        ModelRefused: transformers knows no tokenizer of this kind, or its parts do not fit each other.
    """
    # Here and not above: nothing else in this package needs transformers, which takes seconds to import.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever transformers and tokenizers make of a vocabulary that is none
        raise ModelRefused(
            f"a tokenizer that transformers reads in {path}",
            f"an error ({shortened(str(error))})",
            "choose another file, or the model's checkpoint as safetensors",
        ) from error
    template = fields.get(_TEMPLATE)
    tokenizer.chat_template = template if isinstance(template, str) else None
    tokenizer.save_pretrained(into)
