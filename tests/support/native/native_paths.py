"""The compiled kernel by each of its paths, one at a time."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths

_X86 = ("avx2", "avx512-vnni", "amx", "avx-vnni, VEX", "avx-vnni, EVEX")
_ARM = ("neon", "neon-dotprod", "neon-i8mm")

PATHS = (*(_ARM if platform.machine() == "aarch64" else _X86), paths.EMULATED)
"""This architecture's paths that have code for experts; AVX-VNNI's in both encodings, of which a processor may have one
or both."""


@contextmanager
def forced(path: str) -> Iterator[None]:
    """Computes by one path, by AVX2 without AVX512-BF16 too; skips the test on a processor without it."""
    if not native.available():
        pytest.skip("the compiled kernel was not built, or the processor has no AVX2")
    before, name, encoding = paths.chosen(), *path.partition(", ")[::2]
    if name not in (*paths.available(), paths.EMULATED):
        pytest.skip(f"the processor has no {name}")
    if encoding and native.library().edgemoe_vnni_encoding(encoding == "EVEX"):
        pytest.skip(f"the processor has no {path}")
    paths.choose(paths.forced(name))
    native.use_bf16(name != "avx2")
    try:
        yield
    finally:
        native.use_bf16(True)
        paths.choose(before)
