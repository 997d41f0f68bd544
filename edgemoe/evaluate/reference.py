"""The bf16 model that settings are compared with: a checkpoint, run by transformers."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from edgemoe.console.sizes import format_least, format_size
from edgemoe.errors import DoesNotFit, MissingTensor, UserError
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.files.untrusted import foreign_code
from edgemoe.storage.record.encode import quantize_matrix
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.record.planes import dequantize


class Reference:
    """A checkpoint in memory, in bf16, as transformers runs it.

    Args:
        checkpoint: its directory.
        vocab: vocabulary of the store's model, in tokens.
        source: fingerprint of the checkpoint that the store was converted from; a different one is logged as a
            warning.

    Raises:
        UserError, DamagedData: the checkpoint is unsafe or damaged, or has another vocabulary.
        MissingTensor: the checkpoint lacks a tensor, which transformers would initialise at random.
    """

    def __init__(self, checkpoint: Path, vocab: int, source: str) -> None:
        opened = Checkpoint.open(checkpoint)
        found = opened.config.get("vocab_size")
        if found != vocab:
            raise UserError(
                f"a reference with a vocabulary of {vocab} tokens",
                f"{found} tokens in {checkpoint}",
                "give the checkpoint that the store was converted from to --reference",
            )
        if opened.fingerprint() != source:
            logging.getLogger("edgemoe").warning(
                "%s is not the checkpoint that the store was converted from: KL compares two models",
                checkpoint,
            )
        disable_progress_bar()  # the evaluation has a line of its own
        with foreign_code(f"a checkpoint in {checkpoint} that transformers loads", values=opened.config):
            model, report = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.bfloat16, trust_remote_code=False, output_loading_info=True
            )
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise MissingTensor(
                f"every tensor of the model in {checkpoint}",
                f"a checkpoint without {len(missing)} of them, first {missing[0]}",
                "download the checkpoint again",
            )
        self._model: Any = model.eval()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Returns the logits of every token of one window of n tokens: bf16 [n, vocab]."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            return output.logits[0]  # type: ignore[no-any-return]

    @contextmanager
    def lowered(self, layer: int, level: int) -> Iterator[None]:
        """Gives a layer's experts the weights that a conversion's codes have at `level`, inside the block."""
        modules = self._model.get_submodule(f"model.layers.{layer}").modules()
        experts = next(m for m in modules if hasattr(m, "_apply_gate"))
        parameters = experts.gate_up_proj if experts.has_gate else experts.up_proj, experts.down_proj
        kept = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = _at_level(parameter.data, level, transposed=experts.is_transposed)
            yield
        finally:
            for parameter, weights in zip(parameters, kept, strict=True):
                parameter.data = weights

    def continuation(self, prompt: Sequence[int], stop: Sequence[int], new_tokens: int) -> list[int]:
        """Returns the greedy tokens after a prompt: up to the first of `stop`, which is left out, or `new_tokens`."""
        ids = torch.tensor([list(prompt)])
        # What is not set here would come from the checkpoint's own generation config.
        config = GenerationConfig(
            do_sample=False,
            repetition_penalty=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=list(stop),
            pad_token_id=min(stop, default=0),
        )
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer[:-1] if answer and answer[-1] in stop else answer


def _at_level(weights: torch.Tensor, level: int, *, transposed: bool) -> torch.Tensor:
    """The matrices of a layer's experts [E, N, K], or [E, K, N] where transposed, rounded to a level's codes."""
    lowered = torch.empty_like(weights)
    pairs = zip(weights, lowered, strict=True)
    for matrix, out in ((w.T, o.T) if transposed else (w, o) for w, o in pairs):
        rows, cols = matrix.shape
        codes, parameters = quantize_matrix(matrix, MatrixSpec.of("", rows, cols))
        out.copy_(dequantize(codes, parameters, level)[:rows, :cols])
    return lowered


class LogitFile:
    """Keeps bf16 logits of many windows in an unnamed temporary file, without loss. A context manager.

    Uses the memory of one window, and rows * vocab * 2 bytes of disk.

    Args:
        rows: number of rows of all windows together.
        vocab: width of a row.

    Raises:
        DoesNotFit: the disk of the temporary directory has fewer bytes free.
    """

    def __init__(self, rows: int, vocab: int) -> None:
        size, directory = rows * vocab * 2, tempfile.gettempdir()
        if (free := shutil.disk_usage(directory).free) < size:
            raise DoesNotFit(
                f"{format_least(size)} free in {directory} for the reference's logits",
                format_size(free),
                "use fewer --tokens, or set TMPDIR to a larger disk",
                minimum=size,
            )
        self._vocab = vocab
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._rows: list[int] = []

    def append(self, logits: torch.Tensor) -> None:
        """Appends the logits of the next window: bf16 [n, vocab]."""
        self._file.write(logits.contiguous().view(torch.int16).numpy().data)
        self._rows.append(len(logits))

    def read(self, window: int) -> torch.Tensor:
        """Returns the logits of a window, by its number from 0: bf16 [n, vocab]."""
        rows = self._rows[window]
        self._file.seek(sum(self._rows[:window]) * self._vocab * 2)
        data = bytearray(self._file.read(rows * self._vocab * 2))
        return torch.frombuffer(data, dtype=torch.bfloat16).view(rows, self._vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
