"""llama.cpp's types of one model: files that its own tools make, and their quality."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import gguf
import torch

from edgemoe.errors import UserError
from edgemoe.evaluate.metrics import QualityMeter
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.score import Windows
from tools.engines.compare import ask
from tools.engines.protocol import Request
from tools.peers.bf16_gguf import write_gguf
from tools.peers.quality_rows import Row, bits_of_gguf

TYPES = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_S", "IQ2_XS"),
)
BY_MATRIX_ALONE = {"IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS"}
"""Types that llama-quantize makes with an importance matrix alone."""

IMATRIX_WINDOW = 512
"""Tokens of a window of the text that an importance matrix is measured on, as llama-imatrix has by default."""


class Llama:
    """llama.cpp's files of one model, and their quality.

    Args:
        options: the command line.
        windows: token ids of each window.
        reference: the bf16 model's logits of the windows.
        vocab: width of the logits.
    """

    def __init__(
        self, options: argparse.Namespace, windows: Windows, reference: LogitFile, vocab: int
    ) -> None:
        self._options, self._windows, self._reference, self._vocab = options, windows, reference, vocab
        self._whole: Path = options.place / f"{options.checkpoint.resolve().name}-bf16.gguf"
        self._matrix: Path = self._whole.with_suffix(".imatrix.gguf")

    def rows(self) -> list[Row]:
        """Measures the 16-bit file and every type, without an importance matrix and with one."""
        write_gguf(self._options.checkpoint, self._whole)
        out = [self._row("16 bits", "llama.cpp", self._whole)]
        for kind in self._options.types:
            if kind not in BY_MATRIX_ALONE:
                out.append(self._row(kind, "llama.cpp", self._quantized(kind)))
            if self._options.imatrix_text:
                file = self._quantized(kind, self._importance())
                out.append(self._row(kind, "llama.cpp, importance matrix", file))
        return out

    def _importance(self) -> Path:
        if not self._matrix.exists():
            chunks = self._options.imatrix_tokens // IMATRIX_WINDOW
            self._run(
                "llama-imatrix",
                *("-m", self._whole, "-f", self._options.imatrix_text, "-o", self._matrix),
                *("-c", IMATRIX_WINDOW, "--chunks", chunks, "-t", self._options.threads),
            )
        return self._matrix

    def _quantized(self, kind: str, matrix: Path | None = None) -> Path:
        file: Path = self._whole.with_name(
            self._whole.name.replace("bf16", kind + ("-imatrix" if matrix else ""))
        )
        if not file.exists():
            part = file.with_suffix(".part")
            with_matrix = ("--imatrix", matrix) if matrix else ()
            self._run("llama-quantize", *with_matrix, self._whole, part, kind, self._options.threads)
            part.replace(file)
        return file

    def _run(self, tool: str, *words: object) -> None:
        """Runs a tool of llama.cpp.

        Raises:
            UserError: it failed.
        """
        command = [str(self._options.llama_bin / tool), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise UserError(
                f"exit code 0 from {' '.join(command)}", str(last or done.returncode), "read its output"
            )

    def _row(self, kind: str, program: str, file: Path) -> Row:
        request = Request(
            model=str(file.resolve()),
            prompts=[list(window[:1]) for window in self._windows],
            answers=[list(window[1:]) for window in self._windows],
            new_tokens=0,
            stop=[],
            context=max(map(len, self._windows)),
            vocab=self._vocab,
            threads=self._options.threads,
        )
        rows, meter = ask("llama", self._options.llama_python, request).logprobs, QualityMeter()
        for number, window in enumerate(self._windows):
            own, rows = rows[: len(window) - 1], rows[len(window) - 1 :]
            meter.add(torch.from_numpy(own), window, self._reference.read(number))
        quality = meter.quality()
        return Row(program, kind, bits_of_gguf(gguf.GGUFReader(file)), quality.kl, quality.kl_stderr)
