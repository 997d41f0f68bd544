"""Calls of the compiled kernel, made by this process's library and, compiled for aarch64, under qemu."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.kernels.native import library as native

SOURCES = Path(native.__file__).with_name("csrc")
DRIVER = Path(__file__).with_name("aarch64_driver.c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

POOL = object()
"""The argument of a call that stands for the thread pool."""

_NUMBER, _BUFFER, _FLOAT, _POOL = range(4)


class Structures:
    """An array of one of native.structures' structures, whose pointers are arrays or other Structures.

    Args:
        kind: the type of every structure.
        fields: each structure's values by field. "qkv.weight" names a field inside another, "conv#0" one of an array.
    """

    def __init__(self, kind: type[ctypes.Structure], *fields: dict[str, Any]) -> None:
        self.memory = (kind * len(fields))()
        self.pointers: list[tuple[int, Any]] = []
        """Byte offset of each pointer that is not NULL, and what it points to."""
        for i, each in enumerate(fields):
            for name, value in each.items():
                self._set(self.memory[i], i * ctypes.sizeof(kind), name, value)

    def _set(self, of: Any, at: int, name: str, value: Any) -> None:
        first, _, rest = name.partition(".")
        if rest:
            field, _, index = first.partition("#")
            inner = getattr(of, field)[int(index)] if index else getattr(of, field)
            self._set(inner, at + ctypes.addressof(inner) - ctypes.addressof(of), rest, value)
        elif isinstance(value, np.ndarray | Structures):
            array, _, index = name.partition("#")
            offset = getattr(type(of), array).offset
            if index:
                getattr(of, array)[int(index)] = address(value)
                offset += int(index) * ctypes.sizeof(ctypes.c_void_p)
            else:
                setattr(of, name, address(value))
            self.pointers.append((at + offset, value))
        else:
            setattr(of, name, value)


Buffer = np.ndarray | Structures


def address(buffer: Buffer) -> int:
    """The address of a buffer's first byte."""
    return buffer.ctypes.data if isinstance(buffer, np.ndarray) else ctypes.addressof(buffer.memory)


@dataclass(frozen=True)
class Call:
    """A call of a function of the library, by its name without "edgemoe_".

    Args:
        name: the name of the function.
        arguments: numbers, None, POOL, and buffers; the function reads a buffer's bytes and may replace them.
    """

    name: str
    arguments: tuple[Any, ...]

    @cached_property
    def buffers(self) -> list[Buffer]:
        """Every buffer that the arguments reach, once."""
        found: dict[int, Buffer] = {}

        def reach(buffer: Any) -> None:
            if isinstance(buffer, np.ndarray | Structures) and id(buffer) not in found:
                found[id(buffer)] = buffer
                for _, to in getattr(buffer, "pointers", ()):
                    reach(to)

        for each in self.arguments:
            reach(each)
        return [*found.values()]

    def here(self) -> list[np.ndarray]:
        """Makes the call by this process's library: its result, and then what it leaves in each array."""
        arguments = [
            native.threads() if each is POOL else address(each) if isinstance(each, Buffer) else each
            for each in self.arguments
        ]
        result = self._function()(*arguments)
        return [np.array([result or 0]), *(each for each in self.buffers if isinstance(each, np.ndarray))]

    def _function(self) -> Any:
        function = getattr(native.library(), f"edgemoe_{self.name}")
        if function.argtypes is None:  # no part of the interface for Python
            function.argtypes, function.restype = [ctypes.c_int64] * len(self.arguments), None
        return function

    def request(self, functions: Sequence[str]) -> bytes:
        """The call as the driver reads it; to be taken before the call is made here."""
        index = {id(buffer): i for i, buffer in enumerate(self.buffers)}
        parts = [_numbers(functions.index(self.name), len(self.buffers), len(self.arguments))]
        for buffer in self.buffers:
            memory = buffer.tobytes() if isinstance(buffer, np.ndarray) else bytes(buffer.memory)
            pointers = [(at, index[id(to)]) for at, to in getattr(buffer, "pointers", ())]
            parts += [_numbers(len(memory)), memory, _numbers(len(pointers), *sum(pointers, ()))]
        for each in self.arguments:
            if isinstance(each, Buffer):
                parts.append(_numbers(_BUFFER, index[id(each)]))
            elif isinstance(each, float):
                parts.append(_numbers(_FLOAT, *struct.unpack("<i", struct.pack("<f", each))))
            else:
                parts.append(_numbers(_POOL, 0) if each is POOL else _numbers(_NUMBER, each or 0))
        return b"".join(parts)

    def read(self, results: bytes, at: int) -> tuple[list[np.ndarray], int]:
        """The result of `here`, from the driver's results, and the start of the next call's."""
        found = [
            np.frombuffer(results, np.int64, 1, at) if self._function().restype else np.zeros(1, np.int64)
        ]
        at += 8
        for buffer in self.buffers:
            if isinstance(buffer, np.ndarray):
                found.append(np.frombuffer(results, buffer.dtype, buffer.size, at))
                at += buffer.nbytes
            else:
                at += ctypes.sizeof(buffer.memory)
        return found, at


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def bits(array: np.ndarray) -> np.ndarray:
    """An array's bits, with one NaN for all; of uint16, which is bf16 here, too."""
    if array.dtype == np.uint16:
        return np.where(array & 0x7FFF > 0x7F80, np.uint16(0x7FC0), array).ravel()
    if array.dtype == np.float32:
        return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32).ravel()
    return array.ravel()


def compiled(directory: Path) -> Path:
    """The driver, with the library's sources, for aarch64; skips the test without a compiler or an emulator."""
    for program, package in ((COMPILER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"expected {program} on the path, got none: install {package} (Debian)")
    driver = directory / "driver"
    flags = ["-O3", "-fwrapv", "-ffp-contract=off", "-static", "-o", str(driver)]
    subprocess.run(
        [COMPILER, *flags, str(DRIVER), *map(str, sorted(SOURCES.rglob("*.c"))), "-lm", "-lpthread"],
        check=True,
    )
    return driver


def functions(driver: Path) -> list[str]:
    """The names of the driver's functions, in its order."""
    return subprocess.run([EMULATOR, driver], capture_output=True, text=True, check=True).stdout.split()


def emulated(driver: Path, processor: str, calls: Sequence[Call], requests: bytes) -> list[list[np.ndarray]]:
    """Makes calls on an emulated processor; each has the result of `Call.here`.

    Args:
        driver: the result of `compiled`.
        processor: qemu's name of it.
        calls: the calls to make.
        requests: the calls' requests, one after another.
    """
    sent, answer = driver.with_name(f"requests-{processor}"), driver.with_name(f"results-{processor}")
    sent.write_bytes(requests)
    subprocess.run([EMULATOR, "-cpu", processor, driver, sent, answer], check=True, timeout=120)
    results, at, found = answer.read_bytes(), 0, []
    for call in calls:
        arrays, at = call.read(results, at)
        found.append(arrays)
    assert at == len(results)
    return found
