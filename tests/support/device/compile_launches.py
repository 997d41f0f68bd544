"""Compiles the launches of kernels for GPUs that need not be here, and reports shared memory and spilled registers.

Run in a process of its own with TRITON_INTERPRET=0: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""


class Code(NamedTuple):
    """A compiled launch: Triton's texts, bytes of shared memory, and instructions that spill registers."""

    asm: dict[str, Any]
    shared: int
    spills: int


class Recorder:
    """Stands in for a kernel: a launch records its arguments instead of running."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 1 << 16 for size in grid[1:]), grid

        def launch(*arguments: Any, **options: Any) -> None:
            self._launches.append((self._kernel, arguments, options))

        return launch


def recorded(module: Any, names: tuple[str, ...], run: Callable[[], None]) -> list[Any]:
    """The launches of some of a module's kernels while `run` runs: (kernel, arguments, options)."""
    launches, kernels = list[Any](), {name: getattr(module, name) for name in names}
    for name, kernel in kernels.items():
        setattr(module, name, Recorder(kernel, launches))
    try:
        run()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return launches


def compiled(launch: Any, capability: int) -> Code:
    """Compiles a launch for a compute capability, as 86 for 8.6."""
    kernel, arguments, options = launch
    signature, constants, attributes = dict[str, str](), dict[tuple[int, ...], Any](), {}
    for at, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or argument is None:
            signature[parameter.name], constants[at,] = "constexpr", argument
        elif isinstance(argument, torch.Tensor):
            signature[parameter.name] = "*" + POINTERS[argument.dtype]
            attributes[at,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if isinstance(argument, int) else "fp32"
    code = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    return Code(code.asm, code.metadata.shared, spills(code.asm["cubin"]))


POINTERS = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def spills(cubin: bytes) -> int:
    """Instructions of a cubin that load or store spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True)
    return len(re.findall(r"\b(?:LDL|STL)\b", code.stdout))
