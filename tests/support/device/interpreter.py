"""Triton's interpreter with a GPU's rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from edgemoe.kernels.triton.experts import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
"""Where the kernels of this process run."""

NEEDS_TRITON = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="neither a GPU nor Triton's interpreter"
)


def round_like_a_gpu(monkeypatch) -> None:
    """Makes the interpreter's casts from float32 to bf16 round to even, as a GPU does, instead of truncating.

    On a GPU it does nothing. Loops may also end at a number in memory: the interpreter of Triton up to 3.6 fails at
    that with NumPy from 2.4 on.
    """
    if not INTERPRETED:
        return
    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            exact = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return original(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        patched(tensor, *scope)
        # Newer versions give a scope, which restores what it sets; Triton 3.4 gives none.
        set_attribute = scope[0].set_attr if scope else setattr
        set_attribute(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)

    call = interpreter.InterpretedFunction.__call__

    def call_patched(function: Any, *arguments: Any, **keywords: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages_of(function.fn)):
            return call(function, *arguments, **keywords)
        return function.rewrite()(*arguments, **keywords)

    # The interpreter's own looks through all of triton.language for each call of a function within a kernel.
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_patched)


@cache
def languages_of(function: Callable[..., Any]) -> list[Any]:
    """The modules of triton.language that a function of a kernel uses, which the interpreter patches."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
