"""A sample of what the experts of every layer are given: inputs, and which experts the router chose for them.

The inputs lie on disk, layer after layer, so that a model larger than memory needs the memory of one layer's inputs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import xxhash

from edgemoe.errors import ChecksumMismatch, DamagedData
from edgemoe.experts.step import ExpertProbe, Routed
from edgemoe.storage.files.array_file import read_arrays, write_arrays
from edgemoe.storage.files.atomic import require_free

_INPUTS, _STATE = "inputs.bin", "sample.safetensors"


class ExpertSample(ExpertProbe):
    """Takes the sample window by window, in files from which a killed run goes on.

    Args:
        folder: an existing directory for the files.
        run: identifies what is sampled; files of another run are not used.
        layers: numbers of the layers with experts.
        windows: number of windows.
        window: tokens of each.
        hidden: H, numbers of an expert's input.

    Attributes:
        done: windows that are complete.
        windows: their tokens.
    """

    def __init__(
        self, folder: Path, run: str, layers: tuple[int, ...], windows: int, window: int, hidden: int
    ) -> None:
        self._folder, self._run, self.layers = folder, run, layers
        self._count, self._window, self._hidden = windows, window, hidden
        self.windows: list[tuple[int, ...]] = []
        self._routed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums: list[list[int]] = []
        self._begin_window()
        self._fd = -1
        with suppress(DamagedData, KeyError, ValueError):
            self._load()

    def _begin_window(self) -> None:
        self._now: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in self.layers}
        self._digests = {layer: xxhash.xxh3_64() for layer in self.layers}

    @property
    def done(self) -> int:
        """Number of windows that the files have whole."""
        return len(self._routed)

    @property
    def tokens(self) -> int:
        """Number of tokens of all windows."""
        return self._count * self._window

    def choice_bytes(self, top_k: int) -> int:
        """Most bytes that the routers' choices of k experts per token take: kept, joined, and as they are written."""
        return len(self.layers) * self.tokens * top_k * 3 * (8 + 4)

    def _load(self) -> None:
        description, arrays = read_arrays(self._folder / _STATE)
        if description.get("run") != self._run or not (self._folder / _INPUTS).is_file():
            return
        chosen, gates = torch.from_numpy(arrays["chosen"].astype(np.int64)), torch.from_numpy(arrays["gates"])
        self._routed = list(zip(chosen, gates, strict=True))
        self.windows = [tuple(window) for window in arrays["windows"].tolist()]
        self._sums = arrays["sums"].view(np.uint64).tolist()

    def open(self) -> None:
        """Makes room on the disk for the inputs.

        Raises:
            DoesNotFit: the disk has too little.
        """
        size = len(self.layers) * self.tokens * self._hidden * 2
        path = self._folder / _INPUTS
        if not self.done:
            require_free(path, size)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def routed(self, layer: int, routing: Routed, out: torch.Tensor) -> None:
        """Writes the inputs of a layer in one step, and keeps the router's choice; a window may take several steps."""
        raw = routing.hidden.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        before = sum(len(chosen) for chosen, _ in self._now[layer])
        at, view = self._place(layer, self.done * self._window + before), memoryview(raw)
        while view:
            written = os.pwrite(self._fd, view, at)
            at, view = at + written, view[written:]
        self._digests[layer].update(raw)
        self._now[layer].append((routing.choice.cpu().clone(), routing.gates.float().cpu()))

    def end_window(self, window: tuple[int, ...]) -> None:
        """Notes that every layer has sampled a window, given by its tokens."""
        joined = ([torch.cat(each) for each in zip(*self._now[layer], strict=True)] for layer in self.layers)
        chosen, gates = zip(*joined, strict=True)
        os.fsync(self._fd)
        self._sums.append([self._digests[layer].intdigest() for layer in self.layers])
        self._begin_window()
        self._routed.append((torch.stack(chosen), torch.stack(gates)))
        self.windows.append(window)
        all_chosen, all_gates = (torch.stack(each) for each in zip(*self._routed, strict=True))
        arrays = {
            "chosen": all_chosen.numpy().astype(np.uint16),
            "gates": all_gates.numpy(),
            "windows": np.array(self.windows, np.int64),
            "sums": np.array(self._sums, np.uint64).view(np.int64),
        }
        write_arrays(self._folder / _STATE, {"run": self._run}, arrays)

    def of_layer(self, layer: int) -> LayerSample:
        """Reads the sample of a layer.

        Raises:
            ChecksumMismatch: the inputs on disk differ from the written ones.
        """
        row, size = self.layers.index(layer), self._window * self._hidden * 2
        raw = b"".join(
            os.pread(self._fd, size, self._place(layer, i * self._window)) for i in range(self._count)
        )
        found = [xxhash.xxh3_64_intdigest(raw[i * size : (i + 1) * size]) for i in range(self._count)]
        if found != [sums[row] for sums in self._sums]:
            wanted = f"the sampled inputs of layer {layer} in {self._folder / _INPUTS}"
            raise ChecksumMismatch(wanted, "other bytes", f"remove {self._folder}, and run the command again")
        hidden = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(self.tokens, self._hidden)
        chosen, gates = (torch.cat([each[row] for each in kind]) for kind in zip(*self._routed, strict=True))
        return LayerSample(hidden, chosen, gates)

    def _place(self, layer: int, row: int) -> int:
        """Offset in bytes of one of a layer's rows."""
        return (self.layers.index(layer) * self.tokens + row) * self._hidden * 2


class LayerSample:
    """Inputs of one layer's experts.

    Args:
        hidden: bf16 [T, H].
        choice: int64 [T, k], experts.
        gates: float32 [T, k], their gate weights.
    """

    def __init__(self, hidden: torch.Tensor, choice: torch.Tensor, gates: torch.Tensor) -> None:
        self._hidden, self._chosen, self._gates = hidden, choice, gates

    @property
    def pairs(self) -> int:
        """Number of pairs of a token and an expert that it was routed to."""
        return self._chosen.numel()

    def rows_of(self, expert: int) -> int:
        """Number of tokens that were routed to an expert."""
        return int((self._chosen == expert).sum())

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of an expert, float32 [n, H], and their gate weights, [n, 1]."""
        token, slot = (self._chosen == expert).nonzero(as_tuple=True)
        return self._hidden[token].float(), self._gates[token, slot].unsqueeze(1)

    def hessian(self) -> torch.Tensor:
        """The sum over all pairs of the squared gate weight times the input's products: float32 [H, H]."""
        weighted = self._hidden.float() * self._gates.square().sum(1, keepdim=True).sqrt()
        made: torch.Tensor = weighted.t() @ weighted
        return made


def hessian_of(inputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The sum of the squared gate weights times the inputs' products.

    Args:
        inputs: float32 [n, K].
        gates: float32 [n, 1].

    Returns:
        float32 [K, K].
    """
    weighted = inputs * gates
    made: torch.Tensor = weighted.t() @ weighted
    return made
