"""The files of a release: a wheel without a kernel of its architecture is refused, and zig compiles for old systems."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgemoe.kernels.native.library import INTERFACE
from tools.checkout import ROOT
from tools.dist import KERNEL, UnfitWheel, check_kernel, compiler


def wheel_with(path: Path, library: str, machine: int) -> Path:
    """A file like a wheel with one library, whose header names the number of an architecture."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("edgemoe/__init__.py", "")
        archive.writestr(library, b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + bytes(44))
    return path


def test_a_wheel_has_one_kernel_of_its_architecture(tmp_path):
    """In the ELF format 62 is x86-64 and 183 aarch64; a version of Python in the name is refused."""
    check_kernel(wheel_with(tmp_path / "x.whl", KERNEL, 62), "x86_64")
    check_kernel(wheel_with(tmp_path / "a.whl", KERNEL, 183), "aarch64")
    other_name = KERNEL.replace(".so", ".cpython-311-x86_64-linux-gnu.so")
    for library, machine in ((KERNEL, 183), (other_name, 62), ("edgemoe/none.txt", 62)):
        with pytest.raises(UnfitWheel, match=f"expected {KERNEL} for x86_64 in w.whl, got libraries"):
            check_kernel(wheel_with(tmp_path / "w.whl", library, machine), "x86_64")


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_zig_compiles_the_check_of_instructions(tmp_path, architecture):
    """The files that ask the processor need no part of zig's runtime library, and answer as the system does."""
    pytest.importorskip("ziglang", reason="pip install '.[dist]' brings it")
    library = tmp_path / "library.so"
    csrc = ROOT / "edgemoe" / "kernels" / "native" / "csrc"
    flags = ["-O1", "-fPIC", "-shared", "-o", library]
    subprocess.run(
        [*compiler(architecture), *flags, csrc / "paths.c", csrc / "pool.c", "-lpthread"], check=True
    )
    code = library.read_bytes()
    assert b"pthread_create" in code
    assert b"__cpu_model" not in code
    if platform.machine() == architecture and sys.platform == "linux":
        loaded = ctypes.CDLL(str(library))
        assert getattr(loaded, f"edgemoe_supported_{INTERFACE}")() == (
            "avx2" in Path("/proc/cpuinfo").read_text()
        )
