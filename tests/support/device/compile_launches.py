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
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

USAGE = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""


class Code(NamedTuple):
    """A compiled launch: Triton's texts, bytes of shared memory, and bytes of a thread's spilled registers."""

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
    source, options = source_of(launch), launch[2]
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Code(code.asm, code.metadata.shared, spills(code.asm["cubin"]))


class FrontEndPassed(BaseException):
    """Ends a compilation that has reached the passes of a GPU."""


def translate(source: ASTSource, capability: int, options: dict[str, Any]) -> None:
    """Translates a kernel to Triton's own language, which takes a tenth of a compilation's time.

    Raises:
        triton.CompilationError: the kernel has an expression that only Triton's interpreter accepts.
    """

    def stop(*_: Any) -> None:
        raise FrontEndPassed

    add = CUDABackend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add(self, stages, *rest)
        stages["ttgir"] = stop

    CUDABackend.add_stages = add_stages
    try:
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except FrontEndPassed:
        return
    finally:
        CUDABackend.add_stages = add
    raise AssertionError("expected a compilation that is stopped, got a whole one: is there another stage?")


def source_of(launch: Any) -> ASTSource:
    """A launch's kernel with the types and constants of its arguments."""
    kernel, arguments, _ = launch
    signature, constants, attributes = dict[str, str](), dict[tuple[int, ...], Any](), {}
    for at, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or argument is None:
            signature[parameter.name], constants[at,] = "constexpr", argument
        elif isinstance(argument, torch.Tensor):
            signature[parameter.name] = "*" + POINTERS[argument.dtype]
            attributes[at,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if isinstance(argument, int) else "fp32"
    return ASTSource(kernel, signature, constants, attributes)


POINTERS = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def spills(cubin: bytes) -> int:
    """Bytes of a thread's stack, on which a cubin has nothing but registers that it spills.

    The size is in a table of the cubin: a disassembly takes a hundred times as long.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([USAGE, "-res-usage", file.name], capture_output=True, text=True, check=True)
    sizes = re.findall(r"\bSTACK:(\d+)", shown.stdout + shown.stderr)
    assert len(sizes) == 1, shown
    return int(sizes[0])
