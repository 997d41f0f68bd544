"""Bytes of weights that a token multiplies with in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf

from edgemoe.errors import UserError

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def gguf_bytes_per_token(path: Path) -> float:
    """Bytes of a GGUF's tensors that one token reads: of a layer's experts as many as the token chooses.

    The embedding counts where it is the head as well; else a token reads one row of it, which is left out.

    Args:
        path: the file, whose header has the number of experts and of those per token.

    Raises:
        UserError: the file is one of several.
    """
    reader = gguf.GGUFReader(path)
    split = reader.fields.get(gguf.Keys.Split.LLM_KV_SPLIT_COUNT)
    if split and int(split.contents()) > 1:
        raise UserError(
            "a model in one file", f"{path.name}, one of {split.contents()}", "join them by llama-gguf-split"
        )
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    count, used = (
        int(reader.fields[key.format(arch=architecture)].contents())
        for key in (gguf.Keys.LLM.EXPERT_COUNT, gguf.Keys.LLM.EXPERT_USED_COUNT)
    )
    own_head = any(tensor.name == HEAD for tensor in reader.tensors)
    return sum(
        int(tensor.n_bytes) * (used / count if "_exps." in tensor.name else 1)
        for tensor in reader.tensors
        if not (own_head and tensor.name == EMBEDDING)
    )
