"""Calibrated codes at a model's first use: the decision, a note of what is still to be done, and the run.

The run is `edgemoe convert --calibrate self` on the finished store, in a process of its own, so that its memory is gone
when the model is opened. A note next to the store names the checkpoint until the run has ended, so a killed one goes on
at the next use.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edgemoe.console.sizes import format_size
from edgemoe.console.width import say
from edgemoe.errors import EdgemoeError
from edgemoe.families.head import head_of
from edgemoe.families.table import family_of
from edgemoe.machine.process import available_memory
from edgemoe.models.cache import downloads_directory, note_path
from edgemoe.models.conversion import calibration_run
from edgemoe.models.conversion.calibration_time import calibration_seconds
from edgemoe.models.conversion.dense_default import DENSE_BITS
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import store_bytes
from edgemoe.storage.store.manifest import MANIFEST_NAME, MARKER_NAME

PROCESSES = 1_200_000_000
"""Bytes of memory that two processes take besides the model, with conversion and workspace."""

LONGEST = 300.0
"""Seconds that a calibration at a first use may be expected to take."""


MOST_KILLS = 3
"""Calibrations of a store that may be killed, such as for memory, before it is used as it is."""


@dataclass(frozen=True)
class FirstCodes:
    """The codes and dense weights of a store that a first use makes.

    Args:
        store: its directory in the cache.
        layout: the name of its layout.
        dense_bits: bits of the dense weights; None: measured where codes are calibrated, else DENSE_BITS.
        calibrate: whether codes may be calibrated.
    """

    store: Path
    layout: str
    dense_bits: int | None
    calibrate: bool
    _decided: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def planned(self, checkpoint: Checkpoint) -> bool:
        """Whether codes will be calibrated: of a new store, in less than LONGEST, where disk and memory have room.

        Decided once, since free memory and disk change.
        """
        if not self._decided:
            self._decided.append(self._decide(checkpoint))
        return self._decided[0]

    def _decide(self, checkpoint: Checkpoint) -> bool:
        if not self.calibrate:
            return False
        if any((self.store / name).exists() for name in (MANIFEST_NAME, MARKER_NAME)):
            return note_path(self.store).exists()
        seconds = calibration_seconds(checkpoint)
        if seconds is None or seconds >= LONGEST:
            return False
        family = family_of(checkpoint.config)
        head = head_of(family, checkpoint.config, checkpoint.names())
        size = store_bytes(checkpoint, family, max_level=None, dense_bits=16, head=head)
        if available_memory() < size + PROCESSES:
            return False
        existing = next(parent for parent in self.store.absolute().parents if parent.exists())
        return shutil.disk_usage(existing).free > checkpoint.nbytes + 2 * size

    def conversion_bits(self, checkpoint: Checkpoint, bits: int) -> int:
        """Bits of the dense weights to convert with: bf16 where they will be measured, otherwise `bits`."""
        measured = self.dense_bits is None and self.layout != "cuda" and self.planned(checkpoint)
        return 16 if measured else bits

    def begin(self, checkpoint: Checkpoint, source: Path, name: str) -> None:
        """Notes a planned calibration, and says on stderr how long it will take.

        Args:
            checkpoint: the source.
            source: its path; one in downloads_directory() is removed after the calibration, unless it is to be kept.
            name: the model's, for people.
        """
        if not self.planned(checkpoint):
            return
        downloaded = source.parent == downloads_directory()
        stays = f"; its {format_size(checkpoint.nbytes)} stay on the disk until then" if downloaded else ""
        seconds = calibration_seconds(checkpoint) or 0.0
        time = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        say(
            f"{name} is calibrated once it is converted, in about {time}: half the loss at 2 and 4 bits "
            f"(--plain-codes leaves it out){stays}"
        )
        bits = self.dense_bits or ("auto" if self.layout != "cuda" else DENSE_BITS)
        self.store.parent.mkdir(parents=True, exist_ok=True)
        content = {"source": str(source.absolute()), "dense_bits": "bf16" if bits == 16 else str(bits)}
        note_path(self.store).write_text(json.dumps(content), encoding="utf-8")

    def finish(self) -> None:
        """Calibrates the store if a note says so; where that fails, the store is used as it is.

        Raises:
            KeyboardInterrupt: the calibration was interrupted; the next use goes on.
        """
        note = note_path(self.store)
        if not (note.exists() and (self.store / MANIFEST_NAME).exists()):
            return
        # A damaged note, or a cache that may only be read, keeps no store from being used.
        kinds = (OSError, ValueError, KeyError, TypeError, EdgemoeError)
        with suppress(*kinds), calibration_run.locked(note) as is_free:
            if is_free and not calibration_run.is_busy(self.store):
                self._follow(note)
            elif note.exists():
                say(f"{self.store.name} is being calibrated by another process, and is used as it is here")

    def _follow(self, note: Path) -> None:
        """Does what a note says, and removes it unless the next use is to go on; the note is locked."""
        try:
            content = json.loads(note.read_text(encoding="utf-8"))
            source, bits = Path(content["source"]), str(content["dense_bits"])
            kills = int(content.get("kills", 0))
        except (ValueError, KeyError, TypeError):
            note.unlink()
            raise
        if source.exists():
            if not self.calibrate:
                return  # this use leaves it out; another one may not
            code = calibration_run.run(source, self.store, bits)
            if code < 0 and kills + 1 < MOST_KILLS:
                note.write_text(json.dumps(content | {"kills": kills + 1}), encoding="utf-8")
                return
            if code:
                say(f"{self.store.name} is not calibrated, and is used as it is")
        calibration_run.release(source)
        note.unlink()


AS_ROUNDED = FirstCodes(Path(), "", None, calibrate=False)
"""Calibrates nothing."""
