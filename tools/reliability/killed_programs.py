"""More jobs to be killed: first uses, calibrations, and what a chat writes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import edgemoe
from edgemoe import cli
from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.chat import transcript
from edgemoe.errors import UserError
from edgemoe.kernels.registry import compute
from edgemoe.kv.own_directory import SECRET
from edgemoe.models.resolve import resolve_store
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.run import recode
from tools.reliability.killed_jobs import Compensation, Conversion

TOKENS = 512
"""Tokens of a calibration's text."""

PROMPT = 600
"""Tokens whose keys and values are written to a prefix cache."""

CONVERSATION = "conversation.json"


@dataclass(frozen=True)
class FirstUse(Conversion):
    """The first use of a checkpoint, which converts it into the cache of models; the directory is that cache."""

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Finds the store of the checkpoint, and makes it where there is none."""
        os.environ["XDG_CACHE_HOME"] = str(directory)
        begins()
        resolve_store(self.source, compute("cpu").layout.name)


@dataclass(frozen=True)
class Calibrating(Compensation):
    """`edgemoe calibrate` of the store, on a text that the model writes."""

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Measures experts on TOKENS tokens."""
        store = StoreModel.open(directory)
        begins()
        calibrate(store, CalibrationRequest(None, TOKENS))


def _write_secret(directory: Path) -> None:
    (directory / SECRET).write_bytes(bytes(8))


@dataclass(frozen=True)
class Recoding(Compensation):
    """`edgemoe recode` of the store, on a text that the model writes."""

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Samples TOKENS tokens, and codes every expert on two threads."""
        store = StoreModel.open(directory)
        begins()
        recode(store, self.source, RecodeRequest(None, TOKENS, "low", threads=2))


@dataclass(frozen=True)
class PrefixCaching:
    """The writing of a prompt's keys and values to a prefix cache; the directory is that cache.

    Args:
        plain: a store.
    """

    plain: Path

    def prepare(self, directory: Path) -> None:
        """Writes the directory's secret, which other bytes depend on, and which is random elsewhere."""
        _write_secret(directory)

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Answers one prompt, and ends when its blocks are written."""
        with edgemoe.load(self.plain, prefix_cache_dir=directory, context=2 * PROMPT) as model:
            begins()
            model.generate([3 + i % 29 for i in range(PROMPT)], max_new_tokens=1)

    def sound(self, directory: Path) -> bool:
        """Any blocks are sound: the next run must read the whole ones."""
        return True


@dataclass(frozen=True)
class Saving:
    """`/save` in a chat with a prefix cache, in place of an older conversation.

    Args:
        plain: a store.
    """

    plain: Path

    def prepare(self, directory: Path) -> None:
        """Writes the older conversation, and the secret of the prefix cache."""
        (directory / "kv").mkdir()
        _write_secret(directory / "kv")
        older = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
        transcript.save(directory / CONVERSATION, older)

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Asks one question, then saves; a thread writes both lines, the second once the answer has ended."""
        turns, to_turns = os.pipe()
        from_answers, answers = os.pipe()
        os.dup2(turns, 0)
        os.dup2(answers, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

        def write_turns() -> None:
            os.write(to_turns, b"the lazy dog " * 80 + b"\n")
            while b"\n" not in os.read(from_answers, 1 << 16):
                pass
            begins()
            os.write(to_turns, f"/save {directory / CONVERSATION}\n".encode())
            os.close(to_turns)

        threading.Thread(target=write_turns, daemon=True).start()
        cache = ["--prefix-cache-dir", str(directory / "kv")]
        sys.argv = ["edgemoe", "chat", "--model", str(self.plain), "--max-new-tokens", "2", *cache]
        if code := cli.main():
            raise UserError("a chat that ends with exit code 0", str(code), "run it by hand to see why")

    def sound(self, directory: Path) -> bool:
        """The older conversation or the newer one."""
        return bool(transcript.load(directory / CONVERSATION))
