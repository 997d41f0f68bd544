"""Every error edgemoe raises on purpose.

    EdgemoeError                    exit 1
    ├── UserError                   exit 2   this command, model or prompt cannot be served
    │   ├── ModelRefused                     unsupported family, pickle weights, remote code, hostile config
    │   │   └── TemplateFailed               a chat template that writes no text of a conversation
    │   ├── ContextExceeded                  prompt longer than the context
    │   └── StoreBusy                        another process is writing this store
    ├── DoesNotFit                  exit 3   a memory limit or a disk is too small; carries the minimum
    └── DamagedData                 exit 4   bytes on disk differ from the bytes that were written
        ├── BadHeader                        a header that contradicts its file
        ├── BadManifest                      a store.json that is invalid or contradicts itself
        ├── MissingTensor                    a checkpoint or store without a tensor its config needs
        ├── TruncatedFile                    a file shorter than its manifest says
        ├── ChecksumMismatch                 a plane whose bytes changed
        ├── ReadFailed                       the operating system refused a read, retries included
        ├── WriteFailed                      the operating system refused a write
        └── NotFinite                        NaN or infinity in the logits

Every message reads `expected X, got Y: do Z`. Ctrl-C is Python's own KeyboardInterrupt, exit 130.
"""

from __future__ import annotations

from collections.abc import Callable


class EdgemoeError(Exception):
    """Base of the tree.

    Args:
        expectation: a noun phrase with names and numbers, such as "a size such as 12GB".
        finding: a noun phrase with path, offset and numbers, such as "'12 G'".
        action: an imperative for the user without a final dot, such as "write 12GB".

    >>> print(UserError("a size such as 12GB", "'12 G'", "write 12GB"))
    expected a size such as 12GB, got '12 G': write 12GB
    """

    exit_code = 1

    def __init__(self, expectation: str, finding: str, action: str) -> None:
        super().__init__(f"expected {expectation}, got {finding}: {action}")
        self.expectation, self.finding, self.action = expectation, finding, action

    def reword(self, words: Callable[[str], str]) -> None:
        """Replaces each part of the message by what `words` makes of it."""
        self.expectation, self.finding, self.action = (
            words(self.expectation),
            words(self.finding),
            words(self.action),
        )
        self.args = (f"expected {self.expectation}, got {self.finding}: {self.action}",)


class UserError(EdgemoeError):
    """The request itself cannot be served: its command line, its model or its prompt."""

    exit_code = 2


class ModelRefused(UserError):
    """The model directory is unsupported or unsafe to open."""


class TemplateFailed(ModelRefused):
    """The model's chat template is broken or exceeds a limit. The text names no file."""


class ContextExceeded(UserError):
    """The prompt has more tokens than the context has places."""


class StoreBusy(UserError):
    """Another process holds the store's lock."""


class DoesNotFit(EdgemoeError):
    """A limit (bytes of memory or disk) is too small.

    Args:
        minimum: smallest sufficient number of bytes.
    """

    exit_code = 3

    def __init__(self, expectation: str, finding: str, action: str, *, minimum: int) -> None:
        super().__init__(expectation, finding, action)
        self.minimum = minimum


class DamagedData(EdgemoeError):
    """Bytes on disk differ from the bytes that were written."""

    exit_code = 4


class BadHeader(DamagedData):
    """A safetensors or GGUF header that contradicts its file."""


class BadManifest(DamagedData):
    """A store.json whose values are invalid or contradict each other."""


class MissingTensor(DamagedData):
    """A file or tensor that the model's config or manifest names is missing."""


class TruncatedFile(DamagedData):
    """A file ends before a record does."""


class ChecksumMismatch(DamagedData):
    """A plane's bytes do not have the checksum they were written with."""


class ReadFailed(DamagedData):
    """The operating system refused a read, retries included."""


class WriteFailed(DamagedData):
    """The operating system refused a write; files that were complete before stay complete."""


class NotFinite(DamagedData):
    """NaN or infinity in the logits.

    Args:
        segments: indices of the step's segments whose logits these are.
    """

    def __init__(
        self, expectation: str, finding: str, action: str, *, segments: tuple[int, ...] = ()
    ) -> None:
        super().__init__(expectation, finding, action)
        self.segments = segments


def fault_of(error: OSError | ValueError) -> str:
    """Says in words, without a number, why a path or its text cannot be used.

    >>> fault_of(IsADirectoryError(21, "Is a directory", "x")), fault_of(FileExistsError(17, "File exists", "x"))
    ('a directory', 'a file')
    """
    if isinstance(error, IsADirectoryError):
        return "a directory"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnicodeDecodeError):
        return f"bytes that are not UTF-8, at position {error.start}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
