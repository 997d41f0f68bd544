"""Work of tools.gpu.bench that runs in processes of its own: writing the store, and accelerate's offload."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from edgemoe.engine.engine import StoreModel
from edgemoe.kernels.registry import compute
from edgemoe.machine.device import Device
from tools.checkout import child_environment
from tools.gpu.aims import Json


def synthesize(options: argparse.Namespace, layout: str, store: Path) -> None:
    """Writes the store in a process of its own.

    Raises:
        subprocess.CalledProcessError: the process failed; its stderr says why.
    """
    command = [sys.executable, "-m", "tools.synthetic.store", "--like", options.like, "--max-level", "4"]
    command += ["--layout", layout, "--seed", str(options.seed)]
    command += ["--layers", str(options.layers)] if options.layers else []
    subprocess.run([*command, str(store)], check=True, env=child_environment())


def synthesized(options: argparse.Namespace, device: Device | None, store: Path) -> StoreModel:
    """Writes the store in the layout of a device's kernels, and opens it; None: of the CPU's kernels.

    Raises:
        subprocess.CalledProcessError: it could not be written.
    """
    synthesize(options, compute(device.place if device else "cpu").layout.name, store)
    return StoreModel.open(store, device)


def offload(options: argparse.Namespace, device: str, memory: int) -> Json | str:
    """Times accelerate's offload with `memory` bytes on the device, in its own process; or says why it cannot."""
    if importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed: pip install accelerate"
    command = [sys.executable, "-m", "tools.gpu.offload", "--like", options.like]
    command += ["--layers", str(options.offload_layers), "--memory", str(memory), "--device", device]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--new-tokens", str(options.offload_tokens)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=child_environment())
    if child.returncode:
        return f"accelerate's process ended with {child.returncode}; its stderr says why"
    answer: Json = json.loads(child.stdout.splitlines()[-1])
    return answer
