"""Files of a model on the Hugging Face Hub, over HTTP.

Everything the network does wrong becomes one typed error, at once: nothing here waits for minutes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (
    build_hf_headers,
    disable_progress_bars,
    get_session,
    hf_raise_for_status,
)

from edgemoe.hub.name import HubModel
from storage.atomic import require_free
from storage.errors import DamagedData, EdgemoeError, UserError

TIMEOUT = 5.0
"""Seconds that the Hub has for the first byte of an answer."""

_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
"""Base of every error of the HTTP library, whose name depends on huggingface_hub's version."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PIECE = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model at one commit.

    Args:
        name: in the repository.
        size: bytes.
        sha256: of its contents, where the Hub knows it (it does for weights).
    """

    name: str
    size: int
    sha256: str | None


class HubRepository:
    """A model's files at one commit. Thread-safe.

    Args:
        model: whose.
        commit: full hash.
    """

    def __init__(self, model: HubModel, commit: str) -> None:
        disable_progress_bars()  # edgemoe shows one bar for everything
        self.model, self.commit = model, commit

    @classmethod
    def find(cls, model: HubModel) -> tuple[HubRepository, set[str]]:
        """The repository at the commit that the revision means now, and the names of its files.

        Raises:
            UserError: there is no such model or revision, it is gated, or the Hub cannot be reached.
        """
        with _errors(model):
            found = HfApi().model_info(model.repo, revision=model.revision, timeout=TIMEOUT)
        if not found.sha:
            raise UserError(f"{model.name} was wanted from the Hub", "it names no commit", "Try again later")
        return cls(model, found.sha), {file.rfilename for file in found.siblings or []}

    def file(self, name: str) -> RemoteFile:
        """Size and hash of a file.

        Raises:
            UserError: as find.
        """
        with _errors(self.model):
            found = get_hf_file_metadata(self._url(name), timeout=TIMEOUT, headers=self._headers())
        if found.size is None:
            raise UserError(
                f"the size of {name} of {self.model.name} was wanted", "the Hub does not tell it", "Retry"
            )
        sha256 = found.etag if found.etag and _SHA256.fullmatch(found.etag) else None
        return RemoteFile(name, found.size, sha256)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes start .. end - 1 of a file.

        Raises:
            UserError: as find; or what is between serves no ranges.
        """
        if start >= end:
            return b""
        wanted = f"bytes {start} to {end} of {file.name} of {self.model.name} were wanted"
        headers = self._headers() | {"Range": f"bytes={start}-{end - 1}"}
        with (
            _errors(self.model),
            get_session().stream("GET", self._url(file.name), headers=headers, timeout=TIMEOUT) as response,
        ):
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise UserError(
                    wanted, "the server gives whole files only", "Set HF_ENDPOINT to another server"
                )
            raw = bytes(response.read())
        if len(raw) != end - start:
            raise DamagedData(wanted, f"{len(raw)} came", "Try again")
        return raw

    def download(self, file: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
        """Completes `part` to the whole file, from where an earlier call was interrupted on, and checks its hash.

        Args:
            file: of this repository.
            part: what is there of it; made if it is not.
            progress: called with bytes that came.

        Raises:
            UserError: as find; what came stays.
            DoesNotFit: the disk is too small.
            DamagedData: the hash is not the file's; `part` is removed.
        """
        with part.open("ab") as out:
            have = out.tell()
            if have > file.size:
                out.truncate(have := 0)
            progress(have)
            if have < file.size:
                require_free(part, file.size - have)
                with _errors(self.model):
                    http_get(
                        self._url(file.name),
                        cast(BinaryIO, _Counting(out, progress)),
                        resume_size=have,
                        headers=self._headers(),
                        expected_size=file.size,
                    )
        found = _sha256(part) if file.sha256 else None
        if found != file.sha256:
            part.unlink()
            raise DamagedData(
                f"{file.name} of {self.model.name} with sha256 {file.sha256} was wanted",
                f"what came has {found}",
                "Run the same command again: it is downloaded anew",
            )

    def _url(self, name: str) -> str:
        return hf_hub_url(self.model.repo, name, revision=self.commit)

    @staticmethod
    def _headers() -> dict[str, str]:
        # Compressed, a file could neither be resumed nor be read in ranges.
        return build_hf_headers() | {"Accept-Encoding": "identity"}


class _Counting:
    """A file that tells how many bytes are written to it."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file, self._progress = file, progress

    def write(self, data: bytes) -> int:
        self._progress(len(data))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _errors(model: HubModel) -> Iterator[None]:
    """Makes one typed error of whatever the Hub, or the way to it, answers."""
    wanted = f"{model.name} was wanted from the Hub at {constants.ENDPOINT}"
    try:
        yield
    except EdgemoeError:
        raise
    except GatedRepoError as error:
        raise UserError(
            wanted, "it is gated", "Accept its terms on its page, then run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(wanted, f"there is no revision {model.revision}", "Check it on its page") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            wanted,
            "there is no such model, and no such directory here",
            "Check the name; for a private model run `hf auth login`",
        ) from error
    except (_HTTP_ERROR, OSError) as error:
        found = f"it cannot be reached ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise UserError(
            wanted, found, "Connect to the network and run the same command again, or give a directory"
        ) from error
