"""What this machine can do, and which limits that suggests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.console.sizes import format_size
from edgemoe.machine.disk_speed import PIECE, DiskSpeed, measure_disk
from edgemoe.machine.process import available_memory

if TYPE_CHECKING:
    from edgemoe.machine.device_speed import DeviceSpeed

PROBE = 128 * PIECE
"""Bytes written and read to measure the disk."""

PIN_MOST = 8 << 30
"""Bytes that are pinned in a trial, at most: some systems refuse more than half of memory, few so little."""

_SPARE = 0.1
"""Share of free memory that is suggested to nobody: what others take before edgemoe does."""


@dataclass(frozen=True)
class Findings:
    """What was found. Sizes in bytes, speeds in bytes a second.

    Args:
        directory: whose disk was measured.
        disk: its speed.
        disk_free: on that disk.
        ram_free: that this process may still take, its memory cgroup considered.
        vram_free: on the first CUDA device; None without one.
        gpu: its name; None without one.
        vram_counted: whether the driver tells what this process has of its memory; if not, peaks are estimates. None
            without one.
        gpu_link: memory pinned for the GPU in a trial, and the speed of copies from there; None without one.
        lockable: memory that may be locked (RLIMIT_MEMLOCK); None for any amount.
        vector_width: of the CPU, as torch sees it: AVX512, AVX2 or DEFAULT.
        kernel: that computes experts here: native or torch on a CPU, triton or planes on a GPU.
        layout: that stores are best converted to here.
        cores: that this process may use.
        vram_limit: suggested for --vram-limit.
        dram_limit: suggested for --dram-limit; None: leave it out.
    """

    directory: str
    disk: DiskSpeed
    disk_free: int
    ram_free: int
    vram_free: int | None
    gpu: str | None
    vram_counted: bool | None
    gpu_link: DeviceSpeed | None
    lockable: int | None
    vector_width: str
    kernel: str
    layout: str
    cores: int
    vram_limit: int
    dram_limit: int | None

    def as_json(self) -> dict[str, Any]:
        """Every field, by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for people."""
        direct = "yes" if self.disk.direct else "no: reads go through the page cache, slower"
        lockable = "no limit" if self.lockable is None else format_size(self.lockable)
        slow = (
            ""
            if self.kernel in ("native", "triton")
            else " (Triton is missing: pip install triton)"
            if self.kernel == "planes"
            else " (the compiled one is missing: reinstall where a C compiler is)"
        )
        gpu = (
            f"{self.gpu}, {format_size(self.vram_free or 0)} free" if self.gpu else "none that torch can use"
        )
        limits = f"--vram-limit {self.vram_limit // 10**6}MB"
        if self.dram_limit is not None:
            limits += f" --dram-limit {self.dram_limit // 10**6}MB"
        return [
            f"disk            {self.directory}, {format_size(self.disk_free)} free",
            f"  read          {format_size(self.disk.read)}/s in pieces of {format_size(PIECE)}",
            f"  write         {format_size(self.disk.write)}/s",
            f"  O_DIRECT      {direct}",
            f"memory          {format_size(self.ram_free)} free for this process",
            f"  to be pinned  {lockable}",
            f"GPU             {gpu}",
            *self._link(),
            f"CPU             {self.cores} cores, {self.vector_width}",
            f"  kernel        {self.kernel}{slow}",
            f"  layout        {self.layout}",
            f"suggested       {limits}",
        ]

    def _link(self) -> list[str]:
        link = self.gpu_link
        if link is None:
            return []
        counted = "by the driver" if self.vram_counted else "estimated from above (pip install nvidia-ml-py)"
        speed = "" if link.copied is None else f", {format_size(round(link.copied))}/s from there to the GPU"
        return [
            f"  peaks on it   {counted}",
            f"  pinned for it {format_size(link.pinned)} of {format_size(link.tried)} tried{speed}",
        ]


def examine(directory: Path) -> Findings:
    """Measures and asks; takes a second or two, and PROBE bytes of disk for that long.

    Args:
        directory: where models lie or will lie; its nearest parent that exists is measured.

    Raises:
        DoesNotFit: no room for the measurement.
        UserError: the directory cannot be written.
    """
    import shutil

    import torch

    from edgemoe.kernels.registry import compute
    from edgemoe.machine.device_speed import measure_device
    from edgemoe.machine.devices import open_device
    from storage.convert import cores
    from storage.errors import UserError

    there = next(path for path in (directory, *directory.resolve().parents) if path.is_dir())
    try:
        disk = measure_disk(there, PROBE)
    except OSError as error:
        raise UserError(
            f"the speed of the disk of {there} was wanted", str(error), "Name another directory"
        ) from error
    ram, gpu, vram, link = available_memory(), None, None, None
    # Also where Triton is missing, which `auto` would not choose: the report says so.
    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    if device:
        gpu, vram = torch.cuda.get_device_name(device.place), device.available_bytes()
        link = measure_device(device, min(ram // 2, PIN_MOST))
    vram_limit, dram_limit = suggested(ram, vram)
    kernel = compute(device.place if device else "cpu")
    return Findings(
        directory=str(there),
        disk=disk,
        disk_free=shutil.disk_usage(there).free,
        ram_free=ram,
        vram_free=vram,
        gpu=gpu,
        vram_counted=device.counts_own if device else None,
        gpu_link=link,
        lockable=_lockable(),
        vector_width=torch.backends.cpu.get_cpu_capability(),
        kernel=kernel.name,
        layout=kernel.layout.name,
        cores=cores(),
        vram_limit=vram_limit,
        dram_limit=dram_limit,
    )


def suggested(ram: int, vram: int | None) -> tuple[int, int | None]:
    """(--vram-limit, --dram-limit) in bytes for so much free memory; no DRAM tier without a GPU.

    Args:
        ram: bytes free.
        vram: bytes free on a GPU; None without one.
    """
    from edgemoe.memory.plan import PROCESS_BYTES

    in_ram = max(int(ram * (1 - _SPARE)) - PROCESS_BYTES, 0)
    return (in_ram, None) if vram is None else (int(vram * (1 - _SPARE)), in_ram)


def _lockable() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
