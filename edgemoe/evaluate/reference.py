"""The bf16 model that settings are compared with: transformers' own, of a checkpoint."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from storage.checkpoint import Checkpoint
from storage.errors import DoesNotFit, MissingTensor, UserError


class Reference:
    """A checkpoint in memory, in bf16, as transformers runs it.

    Args:
        checkpoint: its directory.
        vocab: tokens that the store's model has.
        source: fingerprint of the checkpoint that the store was made from; another one is warned of.

    Raises:
        UserError, DamagedData: not a checkpoint that can be trusted, or of another vocabulary.
        MissingTensor: the checkpoint lacks a tensor, which transformers would make up.
    """

    def __init__(self, checkpoint: Path, vocab: int, source: str) -> None:
        opened = Checkpoint.open(checkpoint)
        found = opened.config.get("vocab_size")
        if found != vocab:
            raise UserError(
                f"a reference with a vocabulary of {vocab} tokens was wanted",
                f"{checkpoint} has {found}",
                "Give the checkpoint that the store was converted from to --reference",
            )
        if opened.fingerprint() != source:
            logging.getLogger("edgemoe").warning(
                "%s is not the checkpoint that the store was converted from: KL compares two models",
                checkpoint,
            )
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, trust_remote_code=False, output_loading_info=True
        )
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise MissingTensor(
                f"every tensor of {checkpoint} was wanted",
                f"{len(missing)} are missing, first {missing[0]}",
                "Download the checkpoint again",
            )
        self._model: Any = model.eval()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Every row's logits of one window: bf16 [n, vocab]."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            return output.logits[0]  # type: ignore[no-any-return]

    def continuation(self, prompt: Sequence[int], stop: Sequence[int], new_tokens: int) -> list[int]:
        """Greedy tokens after a prompt, up to one of `stop` (which is not among them) or `new_tokens`."""
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


class LogitFile:
    """Logits of many windows in an unnamed temporary file, exactly as a bf16 model computes them.

    A context manager. Memory is bounded by one window; the file by tokens * vocab * 2 bytes.

    Args:
        rows: of all windows together.
        vocab: width of a row.

    Raises:
        DoesNotFit: the temporary directory has no room for all of them.
    """

    def __init__(self, rows: int, vocab: int) -> None:
        size, directory = rows * vocab * 2, tempfile.gettempdir()
        if (free := shutil.disk_usage(directory).free) < size:
            raise DoesNotFit(
                f"{size} bytes for the reference's logits were wanted in {directory}",
                f"{free} are free",
                "Use fewer --tokens, or set TMPDIR to a larger disk",
                minimum=size,
            )
        self._vocab = vocab
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._rows: list[int] = []

    def append(self, logits: torch.Tensor) -> None:
        """The next window's: bf16 [n, vocab]."""
        assert logits.dtype == torch.bfloat16
        assert logits.shape[1] == self._vocab
        self._file.write(logits.contiguous().view(torch.int16).numpy().data)
        self._rows.append(len(logits))

    def read(self, window: int) -> torch.Tensor:
        """A window's, by its number: bf16 [n, vocab]."""
        rows = self._rows[window]
        self._file.seek(sum(self._rows[:window]) * self._vocab * 2)
        data = np.frombuffer(bytearray(self._file.read(rows * self._vocab * 2)), np.int16)
        return torch.from_numpy(data).view(rows, self._vocab).view(torch.bfloat16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
