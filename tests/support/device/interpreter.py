"""Triton's interpreter with a GPU's rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from edgemoe.kernels.triton import draw
from edgemoe.kernels.triton.experts import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
"""Where the kernels of this process run."""

UNPATCHED = tl.load
"""The function of triton.language outside of a kernel, where the interpreter replaces it."""

NEEDS_TRITON = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="neither a GPU nor Triton's interpreter"
)


def round_like_a_gpu(monkeypatch) -> None:
    """Makes the interpreter's casts from float32 to bf16 round to even, as a GPU does, instead of truncating.

    Casts from bf16 are exact, numbers below the normal ones too.

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
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        return original(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", run_instruction)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_make_range", make_range)
    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        patched(tensor, *scope)
        # Newer versions give a scope, which restores what it sets; Triton 3.4 gives none.
        set_attribute = scope[0].set_attr if scope else setattr
        set_attribute(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)

    call = interpreter.InterpretedFunction.__call__

    def call_patched(function: Any, *arguments: Any, **keywords: Any) -> Any:
        if any(language.load is UNPATCHED for language in languages_of(function.fn)):
            return call(function, *arguments, **keywords)
        return function.rewrite()(*arguments, **keywords)

    # The interpreter's own looks through all of triton.language for each call of a function within a kernel.
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_patched)
    # Without its option `debug` the interpreter computes in 64 bits whether numbers overflow, but nothing asserts it.
    if not interpreter.interpreter_builder.options.debug:
        monkeypatch.setattr(
            TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *args: None, raising=False
        )
    make_types_once(monkeypatch)


def few_programs(monkeypatch) -> None:
    """Makes the interpreter run 2 programs instead of 64 where values of bf16 are weighed."""
    if INTERPRETED:
        monkeypatch.setattr(draw, "SPAN", draw.VALUES // 2)
        monkeypatch.setattr(draw, "_SPAN", tl.constexpr(draw.VALUES // 2))
        monkeypatch.setattr(draw, "_SPANS", tl.constexpr(2))


def make_types_once(monkeypatch) -> None:
    """Makes the type and the shape of tensors once for each name and size, which takes a third of a kernel's time."""
    types, shapes, dtypes = dict[Any, Any](), dict[str, Any](), dict[str, Any]()
    make_type, make_tensor, dtype_of = (
        tl.core.block_type.__init__, tl.core.tensor.__init__, interpreter._get_np_dtype
    )  # fmt: skip

    def type_made(block: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(size, "value", size) for size in shape))
        if (known := types.get(key)) is None:
            make_type(block, element, shape)
            types[key] = dict(vars(block))
        else:
            vars(block).update(known)

    def tensor_made(tensor: Any, handle: Any, kind: Any) -> None:
        if (known := shapes.get(kind.name)) is None:
            make_tensor(tensor, handle, kind)
            shapes[kind.name] = {name: vars(tensor)[name] for name in ("shape", "numel", "dtype")}
        else:
            vars(tensor).update(known, handle=handle, type=kind)

    def dtype_known(kind: Any) -> Any:
        if (known := dtypes.get(kind.name)) is None:
            known = dtypes[kind.name] = dtype_of(kind)
        return known

    monkeypatch.setattr(tl.core.block_type, "__init__", type_made)
    monkeypatch.setattr(tl.core.tensor, "__init__", tensor_made)
    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype_known)


class Instructed:
    """The result of an instruction, as Triton's language takes it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get_result(self, index: int) -> Any:
        """The only result."""
        assert index == 0
        return self.value


def run_instruction(
    builder: Any, text: str, constraints: str, values: Any, types: Any, pure: bool, pack: int
) -> Instructed:
    """Runs one instruction of PTX on NumPy's arrays, of 32-bit words: dp4a or prmt, written as kernels write them."""
    words = np.broadcast_arrays(*(value.data.view(np.uint32) for value in values))
    name, *arguments = text.rstrip(";").replace(",", "").split()
    if name == "prmt.b32":
        order, both = int(arguments[-1], 16), np.concatenate([bytes_of_words(each) for each in words[:2]], -1)
        picked = np.stack([both[..., order >> (4 * at) & 7] for at in range(4)], -1)
        result = picked.astype(np.uint8).view(np.uint32)[..., 0]
    else:
        kinds = [{"u32": np.uint8, "s32": np.int8}[kind] for kind in name.split(".")[1:]]
        pairs = zip(words[:2], kinds, strict=True)
        left, right = (bytes_of_words(each).view(kind).astype(np.int64) for each, kind in pairs)
        result = ((left * right).sum(-1) + words[2].astype(np.int64)).astype(np.uint32)
    return Instructed(interpreter.TensorHandle(result.view(np.int32), tl.int32))


def make_range(builder: Any, *arguments: Any) -> Any:
    """Numbers from `start` to `stop`, the last two arguments, as a tensor of the interpreter."""
    return interpreter.TensorHandle(numbers(*map(int, arguments[-2:])), tl.int32)


@cache
def numbers(start: int, stop: int) -> Any:
    """int32: numbers from `start` to `stop`, made once, as they take a quarter of a kernel's time. Read-only."""
    made = np.arange(start, stop, dtype=np.int32)
    made.flags.writeable = False
    return made


def bytes_of_words(words: Any) -> Any:
    """uint8 [..., 4]: the bytes of uint32 words, from the lowest."""
    return np.ascontiguousarray(words)[..., None].view(np.uint8)


@cache
def languages_of(function: Callable[..., Any]) -> list[Any]:
    """The modules of triton.language that a function of a kernel uses, which the interpreter patches."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
