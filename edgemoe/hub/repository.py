"""Files of a model on the Hugging Face Hub, over HTTP.

Every network failure becomes one typed error within seconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session

from edgemoe.errors import DamagedData, EdgemoeError, UserError
from edgemoe.hub.answers import TIMEOUT, model_info, received, require_success
from edgemoe.hub.name import HubModel
from edgemoe.storage.files.atomic import require_free
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.files.untrusted import shortened

_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
"""Base of every error of the HTTP library; its name depends on huggingface_hub's version."""

SHA256 = "sha256"
"""Hash of a file's bytes, which the Hub gives for files in LFS or Xet: weights, large tokenizers."""

BLOB_ID = "git blob id"
"""SHA-1 of git's header and the file's bytes, which the Hub gives for all other files."""

_DIGITS = {SHA256: 64, BLOB_ID: 40}

_PIECE = 1 << 20
"""Bytes hashed at a time."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model at one commit.

    Args:
        name: the name in the repository.
        size: bytes.
        hash: (SHA256 or BLOB_ID, hex digits) of its contents; None where the Hub gives none.
    """

    name: str
    size: int
    hash: tuple[str, str] | None


class HubRepository:
    """A model's files at one commit. Thread-safe.

    Args:
        model: the model on the Hub.
        commit: full hash.
        files: the files at that commit, with sizes and hashes.
    """

    def __init__(self, model: HubModel, commit: str, files: Collection[RepoSibling]) -> None:
        disable_progress_bars()  # edgemoe shows one bar for all files
        self.model, self.commit = model, commit
        self._files = {file.rfilename: file for file in files}

    @classmethod
    def find(cls, model: HubModel, commit: str | None = None) -> HubRepository:
        """Opens the repository at a commit; None: at the revision's present one.

        Raises:
            UserError: no such model, revision or commit, it is gated, or the Hub cannot be reached or understood.
        """
        with _errors(model):
            found = model_info(model.repo, commit or model.revision)
        if not found.sha:
            raise UserError(f"a commit of {model.name} from the Hub", "none", "try again later")
        return cls(model, commit or found.sha, found.siblings or [])

    @property
    def names(self) -> set[str]:
        """Names of all files."""
        return set(self._files)

    def file(self, name: str) -> RemoteFile:
        """Looks up size and hash of a file by one of `names`.

        Raises:
            UserError: the Hub gives no size.
        """
        found = self._files[name]
        if not isinstance(found.size, int):
            raise UserError(f"the size of {name} of {self.model.name} from the Hub", "none", "try again")
        # The blob id of a file in LFS is its pointer's.
        kind, digits = (SHA256, found.lfs.sha256) if found.lfs else (BLOB_ID, found.blob_id)
        known = re.fullmatch(rf"[0-9a-f]{{{_DIGITS[kind]}}}", str(digits))
        return RemoteFile(name, found.size, (kind, known[0]) if known else None)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Reads bytes start .. end - 1 of a file.

        Raises:
            UserError: from find, or a server that serves no ranges.
            DamagedData: fewer bytes arrived.
        """
        if start >= end:
            return b""
        wanted = f"bytes {start} to {end} of {file.name} of {self.model.name}"
        headers = self._headers() | {"Range": f"bytes={start}-{end - 1}"}
        with (
            _errors(self.model),
            get_session().stream("GET", self._url(file.name), headers=headers, timeout=TIMEOUT) as response,
        ):
            require_success(response, self.model.repo)
            if response.status_code != 206:
                raise UserError(wanted, "the whole file", "set HF_ENDPOINT to a server that serves ranges")
            raw = received(response, wanted, end - start)
        if len(raw) != end - start:
            raise DamagedData(wanted, f"{len(raw)} bytes", "try again")
        return raw

    def download(self, file: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
        """Completes `part` to the whole file, resuming an interrupted call, and checks its hash.

        Args:
            file: a file of this repository.
            part: the downloaded beginning of the file; created if missing.
            progress: called with downloaded bytes.

        Raises:
            UserError: from find; `part` stays for the next call.
            DoesNotFit: the disk is too small.
            DamagedData: the hash differs; `part` is removed.
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
                        cast(BinaryIO, _Counting(out, file.size, progress)),
                        resume_size=have,
                        headers=self._headers(),
                        expected_size=file.size,
                    )
        if file.hash is None:
            return
        kind, digits = file.hash
        found = _hash(part, kind)
        if found != digits:
            part.unlink()
            raise DamagedData(
                f"{file.name} of {self.model.name} with {kind} {digits}",
                f"{kind} {found}",
                "run the same command again: it downloads the file again",
            )

    def _url(self, name: str) -> str:
        return hf_hub_url(self.model.repo, name, revision=self.commit)

    @staticmethod
    def _headers() -> dict[str, str]:
        # A compressed response could neither be resumed nor be read in ranges.
        return build_hf_headers() | {"Accept-Encoding": "identity"}


class _Counting:
    """A file of at most `size` bytes that reports written bytes to `progress`."""

    def __init__(self, file: BinaryIO, size: int, progress: Callable[[int], None]) -> None:
        self._file, self._size, self._progress = file, size, progress

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._size:
            raise DamagedData(f"{self._size} bytes of a file from the Hub", "more", "check HF_ENDPOINT")
        self._progress(len(data))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _hash(path: Path, kind: str) -> str:
    """Computes the SHA256 or BLOB_ID of a file, in hex digits."""
    if kind == SHA256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _errors(model: HubModel) -> Iterator[None]:
    """Turns every failure of the Hub, or of the network, into one UserError."""
    wanted = f"{model.name} from the Hub at {constants.ENDPOINT}"
    try:
        yield
    except EdgemoeError:
        raise
    except GatedRepoError as error:
        action = "accept its terms on its page, then run `hf auth login`"
        raise UserError(wanted, "a gated model", action) from error
    except RevisionNotFoundError as error:
        raise UserError(wanted, f"no revision {model.revision}", "check it on the model's page") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        action = "check the name; for a private model run `hf auth login`"
        raise UserError(wanted, "no such model, and no such directory here", action) from error
    except (_HTTP_ERROR, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        action = "connect to the network and run the same command again, or give a directory"
        raise UserError(wanted, f"no connection: it cannot be reached ({reason})", action) from error
    except Exception as error:  # what huggingface_hub raises about an answer that is none of a Hub
        found = f"an answer that cannot be read ({type(error).__name__}: {shortened(str(error))})"
        raise UserError(wanted, found, "check HF_ENDPOINT, or give a directory") from error
