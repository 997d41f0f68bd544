"""`edgemoe doctor`: measures this machine and suggests limits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgemoe.commands.findings import Findings
from edgemoe.commands.options.configured_command import file_read
from edgemoe.commands.options.shared import JsonOption
from edgemoe.console.width import fitted

if TYPE_CHECKING:
    from edgemoe.kernels.probe import Timing
    from edgemoe.machine.device import Device
    from edgemoe.speed.disk import DiskSpeed
    from edgemoe.speed.rates import Rates

EXAMPLES = "Examples: edgemoe doctor | edgemoe doctor ~/stores --json"

PROBE = 128 << 20
"""Bytes written and read to measure the disk: a multiple of disk_speed.PIECE."""

PIN_MOST = 8 << 30
"""Bytes pinned in the trial, at most: some systems refuse to pin more than half of memory, few refuse 8 GiB."""

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
    """Measure this machine, suggest limits, and estimate the speed of models.

    Reports the speed of the disk and of memory, the free memory, the GPU, the fastest kernels, and what the models with
    short names would do inside the suggested limits. Needs no network, and takes some seconds.
    """
    from edgemoe.models.cache import stores_directory

    found, options = examine(directory or stores_directory()), file_read(ctx)
    if as_json:
        print(json.dumps(asdict(found) | {"options_file": options and str(options)}))
        return
    print(*(fitted(line, indent=16) for line in found.lines(options, full=full)), sep="\n")


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
    rates, limits = _rates(existing, disk, device), suggested_limits(ram, gpu["vram_free"])
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
        rates=rates,
        **_limits(limits, rates, device),
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


def _rates(directory: Path, disk: DiskSpeed, device: Device | None) -> dict[str, Rates]:
    """Measures the rates of memory, and keeps them for plans where the disk that was measured has the cache."""
    from edgemoe.bench.bandwidth import machine_rates
    from edgemoe.machine.user_cache import user_cache
    from edgemoe.models.cache import rates_path
    from edgemoe.speed.rates import keep_rates

    rates = machine_rates(disk.read, device)
    if directory.stat().st_dev == user_cache().stat().st_dev:
        keep_rates(rates_path(), rates)
    return rates


def _limits(limits: tuple[int, int | None], rates: dict[str, Rates], device: Device | None) -> dict[str, Any]:
    """The fields of Findings for suggested limits, with the models of the short list inside them."""
    from edgemoe.models.plans.division import Division
    from edgemoe.models.plans.short_list import short_list

    vram, dram = limits
    models = list(short_list(Division(vram, dram or 0), device, rates))
    return {"vram_limit": vram, "dram_limit": dram, "models": models}


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
