"""Builds the files of a release: an sdist, and per architecture a wheel with the compiled kernel.

    python -m tools.dist [--into dist] [--architectures x86_64 aarch64]

The wheels are built from the sdist, so that a file which it lacks is missed here. zig compiles the kernel for glibc
2.17, and auditwheel names the oldest system on which it runs. Python loads the kernel by ctypes, so that one wheel
serves all versions of Python; its tag is py3-none. `make dist` installs the programs and runs this.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.checkout import ROOT

ARCHITECTURES = {"x86_64": 62, "aarch64": 183}
"""Name of an architecture, in zig's words and in a wheel's tag -> its number in the header of a library (e_machine)."""

GLIBC = (2, 17)
"""The oldest version of glibc for which the kernel is built, as manylinux2014 requires."""

KERNEL = "edgemoe/kernels/native/_kernels.so"
"""The compiled kernel in a wheel. A name without a version of Python is found by all of them."""


class UnfitWheel(Exception):
    """A wheel without a compiled kernel of its architecture, or with one that needs a newer system."""


def copy_checkout(target: Path) -> Path:
    """Copies the files that git does not ignore: a build leaves nothing in the checkout, and takes nothing old from it.

    Args:
        target: a directory, which may be absent.

    Returns:
        target.

    Raises:
        OSError: there is no git.
        CalledProcessError: the checkout is not git's.
    """
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build_sdist(source: Path, into: Path) -> Path:
    """Builds the sdist of a copy of the checkout.

    Args:
        source: the result of copy_checkout; the build leaves files in it.
        into: the directory of the sdist.

    Returns:
        its path.
    """
    _run([sys.executable, "-m", "build", "--sdist", "--outdir", into, source])
    (made,) = into.glob("edgemoe-*.tar.gz")
    return made


def unpack(sdist: Path, into: Path) -> Path:
    """Unpacks an sdist; returns the one directory that it has."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (directory,) = into.iterdir()
    return directory


def compiler(architecture: str) -> list[str]:
    """Returns the command of a C compiler for an architecture and GLIBC.

    Args:
        architecture: a key of ARCHITECTURES.
    """
    version = ".".join(map(str, GLIBC))
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu.{version}"]


def build_wheel(source: Path, architecture: str, into: Path) -> Path:
    """Builds the wheel of one architecture, with its kernel cross-compiled.

    Args:
        source: a directory of unpack.
        architecture: a key of ARCHITECTURES.
        into: the directory of the wheel.

    Returns:
        its path.

    Raises:
        UnfitWheel: the kernel was not compiled (setuptools has printed why), or needs a newer glibc.
        CalledProcessError: a program failed.
    """
    compile_c = shlex.join(compiler(architecture))
    variables = {
        "CC": compile_c,
        "LDSHARED": f"{compile_c} -shared -s",
        "SETUPTOOLS_EXT_SUFFIX": ".so",
        # Without it setuptools would take what it compiled for the machine's own architecture.
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
    }
    with tempfile.TemporaryDirectory() as place:
        built = Path(place)
        _run([sys.executable, "-m", "build", "--wheel", "--outdir", built, source], **variables)
        tags = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", f"linux_{architecture}"]
        (wheel,) = built.iterdir()
        check_kernel(wheel, architecture)
        _run([sys.executable, "-m", "wheel", "tags", "--remove", *tags, wheel])
        (wheel,) = built.iterdir()
        return name_oldest_system(wheel, architecture, into)


def name_oldest_system(wheel: Path, architecture: str, into: Path) -> Path:
    """Lets auditwheel name the oldest systems on which a wheel runs.

    Args:
        wheel: one that says linux; auditwheel leaves files in its directory.
        architecture: a key of ARCHITECTURES.
        into: the directory of the wheel that says manylinux.

    Returns:
        its path.

    Raises:
        UnfitWheel: it needs a newer glibc than GLIBC.
        CalledProcessError: auditwheel failed.
    """
    named = wheel.parent / "named"
    # auto: auditwheel accepts the names of this machine's own architecture only.
    repair: list[str | Path] = ["repair", "--plat", "auto", "--only-plat", "--wheel-dir", named, wheel]
    _run([sys.executable, "-m", "auditwheel", *repair])
    (made,) = named.iterdir()
    platform = "_".join(("manylinux", *map(str, GLIBC), architecture))
    if platform not in made.name:
        raise UnfitWheel(
            f"expected a wheel for {platform}, got {made.name}: python -m auditwheel show FILE names the functions "
            "of newer systems"
        )
    return Path(shutil.move(made, into))


def check_kernel(wheel: Path, architecture: str) -> None:
    """Reads the header of a wheel's kernel.

    Args:
        wheel: its path.
        architecture: a key of ARCHITECTURES, for which the kernel must be.

    Raises:
        UnfitWheel: the wheel has no kernel, or one for another architecture.
    """
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
        header = archive.read(KERNEL)[:20] if compiled == [KERNEL] else b""
    machine = int.from_bytes(header[18:20], "little")
    if header[:4] != b"\x7fELF" or machine != ARCHITECTURES[architecture]:
        raise UnfitWheel(
            f"expected {KERNEL} for {architecture} in {wheel.name}, got libraries {compiled} for machine {machine}: "
            "read the compiler's output above"
        )


def _run(command: Sequence[str | Path], **variables: str) -> None:
    """Runs a program with this Python's programs first on the path (auditwheel starts patchelf).

    Args:
        command: the program and its arguments.
        variables: set in its environment.

    Raises:
        CalledProcessError: it failed.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    subprocess.run(command, check=True, env=os.environ | {"PATH": path} | variables)


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.dist", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="the directory of the files")
    parser.add_argument(
        "--architectures", nargs="*", choices=ARCHITECTURES, default=[*ARCHITECTURES], help="of the wheels"
    )
    options = parser.parse_args(arguments)
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("edgemoe-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as place:
        sdist = build_sdist(copy_checkout(Path(place, "checkout")), into)
        made = [sdist]
        for architecture in options.architectures:
            try:
                made.append(build_wheel(unpack(sdist, Path(place, architecture)), architecture, into))
            except (UnfitWheel, subprocess.CalledProcessError) as error:
                print(f"tools.dist: {error}", file=sys.stderr)
                return 1
    for path in made:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
