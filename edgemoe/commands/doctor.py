"""`edgemoe doctor`: measures this machine and suggests limits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgemoe.commands.options.config_file import file_read
from edgemoe.commands.options.options_file import default_file
from edgemoe.commands.options.shared import JsonOption
from edgemoe.console.sizes import format_size
from edgemoe.console.width import fitted
from edgemoe.machine.packages import install_line

if TYPE_CHECKING:
    from edgemoe.kernels.probe import Timing
    from edgemoe.machine.device import Device
    from edgemoe.speed.device import DeviceSpeed
    from edgemoe.speed.disk import DiskSpeed

EXAMPLES = "Examples: edgemoe doctor | edgemoe doctor ~/stores --json"

PROBE = 128 << 20
"""Bytes written and read to measure the disk: a multiple of disk_speed.PIECE."""

PIN_MOST = 8 << 30
"""Bytes pinned in the trial, at most: some systems refuse to pin more than half of memory, few refuse 8 GiB."""

_KERNEL_NOTES = {
    "planes": f" (Triton is missing: {install_line('triton')})",
    "torch": " (the compiled kernel is missing: reinstall where a C compiler is)",
    "native": " (edgemoe's own compiled code)",
}

FullOption = Annotated[
    bool,
    typer.Option("--full", help="Print the rate of each set of the CPU's instructions, by kind of work."),
]

DirectoryArgument = Annotated[
    Path | None, typer.Argument(help="Where models lie or will lie. Default: the cache.")
]


def doctor_command(
    ctx: typer.Context,
    directory: DirectoryArgument = None,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine and suggest limits.

    Reports the speed of the disk, the free memory, the GPU, and the fastest kernels. Takes some seconds.
    """
    from edgemoe.models.cache import stores_directory

    found, options = examine(directory or stores_directory()), file_read(ctx)
    if as_json:
        print(json.dumps(asdict(found) | {"options_file": options and str(options)}))
        return
    lines = found.lines(full=full)
    lines.insert(-1, f"options file    {options or f'none; {default_file()} would be read'}")
    print(*(fitted(line, indent=16) for line in lines), sep="\n")


@dataclass(frozen=True)
class Findings:
    """The measured machine. Field names are the JSON's. Sizes in bytes, speeds in bytes per second.

    Args:
        directory: a directory on the disk that was measured.
        disk: its speed.
        disk_free: free bytes of that disk.
        kv_directory, kv_bytes: the directory of saved conversations' KV, and the bytes in it.
        ram_free: available to this process, its memory cgroup considered.
        vram_free: free memory of the first CUDA device; None without one.
        gpu: name of that device; None without one.
        vram_counted: whether the driver reports this process's memory; if not, peaks are estimates. None without a GPU.
        gpu_link: memory pinned for the GPU in a trial, and the speed of copies from it; None without a GPU.
        lockable: memory that may be locked (RLIMIT_MEMLOCK); None: without limit.
        vector_width: the vectors that torch finds on the CPU: AVX512, AVX2 or DEFAULT.
        kernel: computes experts here: native or torch on a CPU, triton or planes on a GPU.
        layout: the fastest layout of stores here.
        kernel_times: times of the compiled kernel's paths and of torch's, on the CPU; empty without a compiled one.
        cores: available to this process.
        vram_limit: suggested for --vram-limit.
        dram_limit: suggested for --dram-limit; None: leave it out.
    """

    directory: str
    disk: DiskSpeed
    disk_free: int
    kv_directory: str
    kv_bytes: int
    ram_free: int
    vram_free: int | None
    gpu: str | None
    vram_counted: bool | None
    gpu_link: DeviceSpeed | None
    lockable: int | None
    vector_width: str
    kernel: str
    layout: str
    kernel_times: list[Timing]
    cores: int
    vram_limit: int
    dram_limit: int | None

    def lines(self, *, full: bool = False) -> list[str]:
        """The findings as a table for people.

        Args:
            full: whether every rate of kernel_times has its place.
        """
        from edgemoe.speed.disk import PIECE

        disk = self.disk
        direct = "yes" if disk.direct else "no: reads go through the system's cache, slower"
        lockable = "no limit" if self.lockable is None else format_size(self.lockable)
        gpu = (
            f"{self.gpu}, {format_size(self.vram_free or 0)} free" if self.gpu else "none that torch can use"
        )
        limits = f"--vram-limit {self.vram_limit // 10**6}MB"
        if self.dram_limit is not None:
            limits += f" --dram-limit {self.dram_limit // 10**6}MB"
        return [
            f"disk            {self.directory}, {format_size(self.disk_free)} free",
            f"  read          {format_size(disk.read)}/s in pieces of {format_size(PIECE)}",
            f"  write         {format_size(disk.write)}/s",
            f"  direct reads  {direct}",
            f"  saved KV      {format_size(self.kv_bytes)} in {self.kv_directory}",
            f"memory          {format_size(self.ram_free)} free for this process",
            f"  to be locked  {lockable}",
            f"GPU             {gpu}",
            *self._link(),
            f"CPU             {self.cores} cores, {self.vector_width}",
            f"  kernel        {self.kernel}{_KERNEL_NOTES.get(self.kernel, '')}",
            f"  layout        {self.layout}",
            *(self._kernel_times() if full else self._instructions()),
            f"suggested       {limits}",
        ]

    def _instructions(self) -> list[str]:
        """A line with the instructions that compute a new token; none without a compiled kernel."""
        if not self.kernel_times:
            return []
        from edgemoe.kernels.probe import preferred

        taken = preferred([one for one in self.kernel_times if one.path != "torch"])
        tokens = ", ".join(f"{path} for {work}" for (work, rows), path in taken.items() if rows == "1")
        return [f"  instructions  {tokens}; --full has the rates of all"]

    def _kernel_times(self) -> list[str]:
        """A line for each kind of work and number of rows: the path that is taken, the others by rate, then torch."""
        if not self.kernel_times:
            return []
        from edgemoe.kernels.probe import preferred

        by_sample: dict[tuple[str, str], list[Timing]] = {}
        taken = preferred([one for one in self.kernel_times if one.path != "torch"])
        for one in self.kernel_times:
            by_sample.setdefault((one.work, one.rows), []).append(one)
        lines = []
        for (work, rows), timings in by_sample.items():
            first = taken[work, rows]
            ranked = sorted(timings, key=lambda one: (one.path != first, one.path == "torch", one.seconds))
            rates = ", ".join(f"{one.path} {one.rate / 1e9:.0f}" for one in ranked)
            lines.append(f"    {work}, {rows} rows: {rates}")
        heading = (
            "  instructions  billion products per second, those that are taken first; torch's for comparison"
        )
        return [heading, *lines]

    def _link(self) -> list[str]:
        link = self.gpu_link
        if link is None:
            return []
        estimated = f"an upper estimate ({install_line('nvidia-ml-py')})"
        counted = "by the driver" if self.vram_counted else estimated
        speed = "" if link.copied is None else f", {format_size(round(link.copied))}/s from there to the GPU"
        return [
            f"  counted       {counted}",
            f"  RAM locked    {format_size(link.pinned)} of {format_size(link.tried)} tried, for copies to it{speed}",
        ]


def examine(directory: Path) -> Findings:
    """Measures this machine in a second or two; PROBE bytes of disk are in use meanwhile.

    Args:
        directory: where models lie or will lie; its nearest existing parent is measured.

    Raises:
        DoesNotFit: the disk has fewer than PROBE bytes free.
        UserError: the directory cannot be written.
    """
    import shutil

    import torch

    from edgemoe.machine.devices import open_device
    from edgemoe.machine.process import available_memory
    from edgemoe.memory.overhead import suggested_limits
    from edgemoe.models.cache import disk_bytes, kv_directory

    existing, disk = _disk(directory)
    ram = available_memory()
    # By name, since `auto` skips a GPU without Triton and the report shall say that Triton is missing.
    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = _gpu(device, ram)
    vram_limit, dram_limit = suggested_limits(ram, gpu["vram_free"])
    return Findings(
        directory=str(existing),
        disk=disk,
        disk_free=shutil.disk_usage(existing).free,
        kv_directory=str(kv_directory()),
        kv_bytes=disk_bytes(kv_directory()),
        ram_free=ram,
        **gpu,
        lockable=_lockable(),
        **_cpu(device),
        vram_limit=vram_limit,
        dram_limit=dram_limit,
    )


def _disk(directory: Path) -> tuple[Path, DiskSpeed]:
    """The nearest directory that exists, and the speed of its disk; raises as examine."""
    from edgemoe.errors import UserError
    from edgemoe.speed.disk import measure_disk

    existing = next(path for path in (directory, *directory.resolve().parents) if path.is_dir())
    try:
        return existing, measure_disk(existing, PROBE)
    except OSError as error:
        raise UserError(
            f"a writable disk at {existing}, to measure it", str(error), "name another directory"
        ) from error


def _cpu(device: Device | None) -> dict[str, Any]:
    """The fields of Findings that describe the CPU, and the kernel that computes experts here."""
    import torch

    from edgemoe.kernels.registry import compute
    from edgemoe.machine.cgroups import cores

    kernel = compute(device.place if device else "cpu")
    return {
        "vector_width": torch.backends.cpu.get_cpu_capability(),
        "kernel": kernel.name,
        "layout": kernel.layout.name,
        "kernel_times": _kernel_times(),
        "cores": cores(),
    }


def _gpu(device: Device | None, ram: int) -> dict[str, Any]:
    """The fields of Findings that describe a GPU; all None without one. `ram`: free bytes."""
    import torch

    from edgemoe.speed.device import measure_device

    if device is None:
        return dict.fromkeys(("gpu", "vram_free", "vram_counted", "gpu_link"))
    return {
        "gpu": torch.cuda.get_device_name(device.place),
        "vram_free": device.available_bytes(),
        "vram_counted": device.counts_own,
        "gpu_link": measure_device(device, min(ram // 2, PIN_MOST)),
    }


def _kernel_times() -> list[Timing]:
    """Measures every path anew, and keeps the times for later starts."""
    from edgemoe.kernels.native import library
    from edgemoe.models.cache import kernels_directory

    if not library.available():
        return []
    from edgemoe.kernels.probe import measure_and_keep
    from edgemoe.kernels.torch_times import torch_timings

    return [*measure_and_keep(kernels_directory()), *torch_timings()]


def _lockable() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
