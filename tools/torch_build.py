"""Chooses the build of torch for `make install`, and says how much the installation downloads before it begins.

    python tools/torch_build.py auto|cpu|cuda

Prints on stdout what pip is to install with edgemoe, and the sizes on stderr. `auto` is cuda where there is an NVIDIA
driver. The CPU build comes from the configured index, or else from PyTorch's own; where neither has it, torch comes
with its libraries for CUDA, several gigabytes, which is said too. Runs before edgemoe's packages are there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

VERSION = "2.13.0"
"""The version that the CPU kernels are tested with."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

BUILDS = ("auto", "cpu", "cuda")

_TIMEOUT = 10
"""Seconds for an answer of a server; nothing depends on one."""

Resolve = Callable[[Sequence[str]], list[dict[str, Any]] | None]
"""Returns what pip would download for its arguments; None where it finds no such packages."""


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded, in WSL too."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvidiactl"))


def candidates(build: str) -> Iterator[list[str]]:
    """Yields pip's arguments for torch, the best first; none for a torch that comes with the dependencies."""
    if build == "cpu":
        yield [f"torch=={VERSION}+cpu"]
        yield [f"torch=={VERSION}+cpu", "--extra-index-url", CPU_INDEX]
        yield [f"torch=={VERSION}"]
    yield []


def choose(build: str, resolve: Resolve) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the first arguments that pip can install, and what it would download for them and edgemoe.

    Args:
        build: cpu or cuda.
        resolve: resolve_by_pip.
    """
    for torch in candidates(build):
        found = resolve([*torch, "."])
        if found is not None:
            return torch, found
    return torch, []


def resolve_by_pip(arguments: Sequence[str]) -> list[dict[str, Any]] | None:
    """Runs pip without installing anything."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--report",
            str(report),
            "--retries",
            "1",
        ]
        quiet = ["--quiet", "--quiet", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, *quiet, *arguments], check=False, stdout=sys.stderr)
        return json.loads(report.read_text())["install"] if done.returncode == 0 else None


def size_of(url: str) -> int | None:
    """Bytes of a file to download; 0 for a directory, None where the server does not say."""
    if url.startswith("file://"):
        path = Path(urllib.request.url2pathname(url.removeprefix("file://")))
        return path.stat().st_size if path.is_file() else 0
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return int(answer.headers["Content-Length"])
    except urllib.error.HTTPError as error:
        error.close()  # it holds the answer
        return None
    except (OSError, TypeError, ValueError):
        return None


def summary(packages: Sequence[dict[str, Any]], sizes: Sequence[int | None]) -> str:
    """Says in a line what is downloaded: all of it, and the largest packages."""
    names = [f"{each['metadata']['name']} {each['metadata']['version']}" for each in packages]
    known = sorted(((size, name) for size, name in zip(sizes, names, strict=True) if size), reverse=True)
    largest = ", ".join(f"{name} {megabytes(size)}" for size, name in known[:3])
    unknown = sum(size is None for size in sizes)
    more = f", and {unknown} packages of unknown size" if unknown else ""
    return (
        f"{megabytes(sum(size for size, _ in known))} to download ({largest}; {len(packages)} packages){more}"
    )


def megabytes(size: int) -> str:
    """Formats a size.

    >>> megabytes(2_700_000_000), megabytes(190_400_000), megabytes(40_000)
    ('2.7 GB', '190 MB', '0.04 MB')
    """
    return f"{size / 1e9:.2g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def say(text: str) -> None:
    """Prints a line for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def main(build: str) -> int:
    """Runs the program; returns its exit code."""
    if build not in BUILDS:
        say(f"expected TORCH_BUILD={', '.join(BUILDS)}, got {build!r}: choose one of them")
        return 2
    chosen = ("cuda" if has_driver() else "cpu") if build == "auto" else build
    if importlib.util.find_spec("torch"):
        if build != "auto":
            say(f"torch is installed already: remove {os.path.relpath(sys.prefix)} to change its build")
        return 0
    why = (
        f"as there is {'an' if chosen == 'cuda' else 'no'} NVIDIA driver"
        if build == "auto"
        else "as TORCH_BUILD says"
    )
    say(f"torch for {chosen.upper()}, {why}; make install TORCH_BUILD=cpu or cuda chooses")
    torch, found = choose(chosen, resolve_by_pip)
    if chosen == "cpu" and torch[:1] != [f"torch=={VERSION}+cpu"]:
        say("no index has torch's CPU build: it comes with libraries for CUDA")
    if found:
        sizes = [size_of(each["download_info"]["url"]) for each in found]
        say(f"{summary(found, sizes)}, into {os.path.relpath(sys.prefix)}")
    print(*torch)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*(sys.argv[1:] or ["auto"])))
