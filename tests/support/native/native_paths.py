"""The compiled kernel by each of its paths, one at a time."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths

_X86 = ("avx2", "avx512-vnni", "amx", "avx-vnni, VEX", "avx-vnni, EVEX")
_ARM = ("neon", "neon-dotprod", "neon-i8mm")

PATHS = (*(_ARM if platform.machine() == "aarch64" else _X86), paths.EMULATED)
"""This architecture's paths that have code for experts; AVX-VNNI's in both encodings, of which a processor may have one
or both."""


def missing(path: str) -> str | None:
    """Why a path does not run here, or None; an encoding of AVX-VNNI that runs is chosen."""
    if not native.available():
        return "the compiled kernel was not built, or the processor has no AVX2"
    name, _, encoding = path.partition(", ")
    if name not in (*paths.available(), paths.EMULATED):
        return f"the processor has no {name}"
    if encoding and native.library().edgemoe_vnni_encoding(encoding == "EVEX"):
        return f"the processor has no {path}"
    return None


def running(candidates: Sequence[str]) -> list[str]:
    """The paths among `candidates` that run here, or the first one where none does.

    Pairwise cases take these: a pair of other values must not be left to a case that is skipped.
    """
    return [path for path in candidates if missing(path) is None] or [candidates[0]]


@contextmanager
def forced(path: str) -> Iterator[None]:
    """Computes by one path, by AVX2 without AVX512-BF16 too; skips the test on a processor without it."""
    if reason := missing(path):
        pytest.skip(reason)
    before, name = paths.choice(), path.partition(", ")[0]
    paths.choose(paths.forced(name))
    native.use_bf16(name != "avx2")
    try:
        yield
    finally:
        native.use_bf16(True)
        paths.choose(before)
