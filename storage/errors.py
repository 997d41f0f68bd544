"""Every error edgemoe raises on purpose.

    EdgemoeError                    exit 1
    ├── UserError                   exit 2   the command, the model or the prompt cannot be served as asked
    │   ├── ModelRefused                     unsupported family, pickle weights, remote code, hostile config
    │   ├── ContextExceeded                  prompt longer than the context
    │   └── StoreBusy                        another process is writing this store
    ├── DoesNotFit                  exit 3   a memory limit or a disk is too small; carries the minimum
    └── DamagedData                 exit 4   what is on disk is not what was written
        ├── BadHeader                        a safetensors header that lies about its file
        ├── BadManifest                      a store.json that cannot be believed
        ├── MissingTensor                    a checkpoint or store without a tensor its config needs
        ├── TruncatedFile                    a file shorter than its manifest says
        ├── ChecksumMismatch                 a plane whose bytes changed
        ├── ReadFailed                       the device kept refusing a read
        ├── WriteFailed                      the device refused a write
        └── NotFinite                        NaN or infinity in the logits

Every message has three parts: what was wanted, what was found there, what to do about it.
Ctrl-C is Python's own KeyboardInterrupt, exit 130.
"""

from __future__ import annotations


class EdgemoeError(Exception):
    """Base of the tree.

    Args:
        wanted: what edgemoe tried to do, with names and numbers.
        found: what was there instead, with path, offset and numbers.
        advice: what the user can do about it; an imperative sentence.
    """

    exit_code = 1

    def __init__(self, wanted: str, found: str, advice: str) -> None:
        super().__init__(f"{wanted}: {found}. {advice}")
        self.wanted = wanted
        self.found = found
        self.advice = advice


class UserError(EdgemoeError):
    """The request itself cannot be served."""

    exit_code = 2


class ModelRefused(UserError):
    """The model directory is unsupported, or asks for something unsafe."""


class ContextExceeded(UserError):
    """The prompt has more tokens than the context holds."""


class StoreBusy(UserError):
    """Another process holds the store's lock."""


class DoesNotFit(EdgemoeError):
    """A limit (bytes of memory or disk) is too small.

    Args:
        minimum: the smallest number of bytes that would do.
    """

    exit_code = 3

    def __init__(self, wanted: str, found: str, advice: str, *, minimum: int) -> None:
        super().__init__(wanted, found, advice)
        self.minimum = minimum


class DamagedData(EdgemoeError):
    """Bytes on disk are not what was written."""

    exit_code = 4


class BadHeader(DamagedData):
    """A safetensors header that lies about its file."""


class BadManifest(DamagedData):
    """A store.json that cannot be believed."""


class MissingTensor(DamagedData):
    """A tensor that the model's config needs is not there."""


class TruncatedFile(DamagedData):
    """A file ends before a record does."""


class ChecksumMismatch(DamagedData):
    """A plane's bytes do not have the checksum they were written with."""


class ReadFailed(DamagedData):
    """The operating system kept refusing a read."""


class WriteFailed(DamagedData):
    """The operating system refused a write; what was whole before still is."""


class NotFinite(DamagedData):
    """NaN or infinity in the logits."""
