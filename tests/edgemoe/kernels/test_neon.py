"""The compiled kernel on aarch64, bit for bit against AVX2: cross-compiled, and run by qemu on three processors."""

from __future__ import annotations

import platform

import aarch64
import numpy as np
import pytest
from aarch64 import Call
from kernel_calls import KERNEL_CALLS
from layer_calls import layer_calls
from native_paths import forced

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths

pytestmark = [
    pytest.mark.folders,  # compiles for some 13 s, and runs in an emulator
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not native.available(),
        reason="expected the compiled kernel with AVX2, for the wanted results, got none",
    ),
]

PROCESSORS = {
    "cortex-a53": ["neon"],
    "cortex-a76": ["neon", "neon-dotprod"],
    "max": ["neon", "neon-dotprod", "neon-i8mm"],
}
"""qemu's names of processors, and the paths of each."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The sources of the kernel and a program that calls them, for aarch64."""
    return aarch64.compiled(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def calls(driver):
    """Calls, the request of each, and what AVX2 gives."""
    found = [call for calls in (*KERNEL_CALLS, layer_calls) for call in calls()]
    requests = [call.request(aarch64.functions(driver)) for call in found]
    with forced("avx2"):
        want = [[array.copy() for array in call.here()] for call in found]
    assert all(result[0] >= 0 for result, *_ in want)  # no call is refused
    return found, requests, want


@pytest.mark.parametrize(
    ("processor", "path"),
    [*((processor, found[-1]) for processor, found in PROCESSORS.items()), ("max", paths.EMULATED)],
)
def test_every_function_gives_the_bits_of_avx2(driver, calls, processor, path):
    """Every function but the pool's, on the narrowest processor that has the path."""
    found, requests, want = calls
    index = paths.PATHS.index(path)
    choices = [Call("choose_path", (work, rows, index)) for work in range(4) for rows in range(4)]
    requests = [choice.request(aarch64.functions(driver)) for choice in choices] + requests
    results = aarch64.emulated(driver, processor, [*choices, *found], b"".join(requests))
    assert all(result[0] == 0 for (result,) in results[: len(choices)])
    for call, got, expected in zip(found, results[len(choices) :], want, strict=True):
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            same = np.array_equal(aarch64.bits(one), aarch64.bits(other))
            assert same, f"{call.name}, buffer {i} of {[a for a in call.arguments if isinstance(a, int)]}"


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_has_the_paths_of_its_features(driver, processor, monkeypatch):
    """The system lists dotprod and i8mm; the widest path is the first choice where it has code of its own."""
    works, rows = range(len(paths.WORKS)), range(len(paths.ROWS))
    choices = [Call("chosen_path", (work, row)) for work in works for row in rows]
    made = [Call("paths", ()), Call("choose_widest", ()), *choices]
    names = aarch64.functions(driver)
    results = aarch64.emulated(driver, processor, made, b"".join(call.request(names) for call in made))
    found, _, *chosen = (int(result[0]) for (result,) in results)
    monkeypatch.setattr(paths, "_found", lambda: found)
    assert paths.available() == PROCESSORS[processor]
    for call, path in zip(choices, chosen, strict=True):
        work, row = (of[i] for of, i in zip((paths.WORKS, paths.ROWS), call.arguments, strict=True))
        assert paths.PATHS[path] == (paths.candidates(work, row) or ["neon"])[-1], (work, row)
