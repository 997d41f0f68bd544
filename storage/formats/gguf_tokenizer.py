"""The tokenizer and chat template of a GGUF file, as files of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgemoe.storage.files.untrusted import foreign_code

_TEMPLATE = "tokenizer.chat_template"


def unpack_tokenizer(path: Path, fields: Mapping[str, Any], into: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the file has a template, chat_template.jinja.

    Args:
        path: the path of the GGUF file, whose header is checked.
        fields: fields of that header.
        into: directory for the files.

    Raises:
        ModelRefused: transformers does not support the tokenizer, or its parts contradict each other.
    """
    # Imported here: transformers takes seconds to import, and only this function needs it.
    from transformers import PreTrainedTokenizerFast

    template = fields.get(_TEMPLATE)
    action = "choose another file, or the model's checkpoint as safetensors"
    with foreign_code(f"a tokenizer that transformers reads in {path}", action):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.chat_template = template if isinstance(template, str) else None
        tokenizer.save_pretrained(into)
