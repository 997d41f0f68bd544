"""The findings of `edgemoe doctor`, and the table that it prints of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.commands.options.options_file import default_file
from edgemoe.console.sizes import format_size
from edgemoe.machine.packages import install_line

if TYPE_CHECKING:
    from edgemoe.kernels.probe import Timing
    from edgemoe.models.plans.short_list import Listed
    from edgemoe.speed.device import DeviceSpeed
    from edgemoe.speed.disk import DiskSpeed
    from edgemoe.speed.rates import Rates

_KERNEL_NOTES = {
    "planes": f" (Triton is missing: {install_line('triton')})",
    "torch": " (the compiled kernel is missing: reinstall where a C compiler is)",
    "native": " (edgemoe's own compiled code)",
}


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
        rates: cpu, and cuda with a GPU -> rates of reads and copies of memory; `edgemoe plan` uses them too.
        models: the models of the short list inside the suggested limits, with their expected speed.
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
    rates: dict[str, Rates]
    models: list[Listed]

    def lines(self, options: Path | None, *, full: bool = False) -> list[str]:
        """The findings as a table for people.

        Args:
            options: the file of options that was read; None: there is none.
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
            f"  read          {format_size(self.rates['cpu'].vram)}/s",
            f"  to be locked  {lockable}",
            f"GPU             {gpu}",
            *self._link(),
            f"CPU             {self.cores} cores, {self.vector_width}",
            f"  kernel        {self.kernel}{_KERNEL_NOTES.get(self.kernel, '')}",
            f"  layout        {self.layout}",
            *(self._kernel_times() if full else self._instructions()),
            f"options file    {options or f'none; {default_file()} would be read'}",
            f"suggested       {limits}",
            "models          inside these limits, at an estimated speed; `edgemoe chat NAME` downloads one",
            *(f"  {one.name:<14}{one.line(self.disk_free)}" for one in self.models),
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
        heading = "  instructions  billion products per second, the chosen path first; torch's for comparison"
        return [heading, *lines]

    def _link(self) -> list[str]:
        link = self.gpu_link
        if link is None:
            return []
        estimated = f"an upper estimate ({install_line('nvidia-ml-py')})"
        counted = "by the driver" if self.vram_counted else estimated
        read = f", read {format_size(self.rates['cuda'].vram)}/s"
        speed = "" if link.copied is None else f", {format_size(round(link.copied))}/s from there to the GPU"
        return [
            f"  counted       {counted}{read}",
            f"  RAM locked    {format_size(link.pinned)} of {format_size(link.tried)} tried, for copies to it{speed}",
        ]
