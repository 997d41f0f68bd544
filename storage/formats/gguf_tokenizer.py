"""The tokenizer and chat template of a GGUF file, as files of transformers.

transformers makes the tokenizer; what llama.cpp does otherwise is set here. A text of a SentencePiece vocabulary is
cut at special tokens, and every piece gets a space in front (`add_space_prefix`). A vocabulary may begin every text
with a token (`add_bos_token`), a chat's too, where the template leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgemoe.storage.files.untrusted import foreign_code

_TEMPLATE = "tokenizer.chat_template"
_OWN = "tokenizer.ggml."
_SENTENCEPIECE = "llama"
_SPACE = "▁"

_BEGIN_ADDED = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
)
"""Rules that split text (`tokenizer.ggml.pre`) whose vocabularies begin every text with a token, unless the file says
otherwise."""


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
        if fields.get(f"{_OWN}model") == _SENTENCEPIECE:
            _set_spaces(
                tokenizer.backend_tokenizer, prefix=fields.get(f"{_OWN}add_space_prefix") is not False
            )
        begin = tokenizer.bos_token if _adds_begin(fields) else None
        if begin is not None:
            _begin_with(tokenizer, begin)
        tokenizer.chat_template = _with_begin(template, begin) if isinstance(template, str) else None
        tokenizer.save_pretrained(into)


def _adds_begin(fields: Mapping[str, Any]) -> bool:
    """Whether every text begins with the token `bos_token_id`."""
    given = fields.get(f"{_OWN}add_bos_token")
    if isinstance(given, bool):
        return given
    return fields.get(f"{_OWN}model") == _SENTENCEPIECE or fields.get(f"{_OWN}pre") in _BEGIN_ADDED


def _set_spaces(backend: Any, *, prefix: bool) -> None:
    """Makes a tokenizer write spaces as SentencePiece's, with one more before each piece between special tokens."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    backend.pre_tokenizer = None
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


def _begin_with(tokenizer: Any, begin: str) -> None:
    """Makes a tokenizer put a token before each text, if it does not do so already."""
    from tokenizers import processors

    number = tokenizer.convert_tokens_to_ids(begin)
    if tokenizer("a")["input_ids"][:1] != [number]:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, number)]
        )


def _with_begin(template: str, begin: str | None) -> str:
    """A chat template whose text begins with a token, where the template itself never writes the token."""
    written = begin is None or begin in template or "bos_token" in template
    return template if written else "{{ bos_token }}" + template
