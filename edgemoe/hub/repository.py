"""Files of a model on the Hugging Face Hub, over HTTP.

Every network failure becomes one typed error within seconds.
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
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status

from edgemoe.hub.name import HubModel
from storage.atomic import require_free
from storage.errors import DamagedData, EdgemoeError, UserError
from storage.untrusted import shortened

TIMEOUT = 5.0
"""Seconds until the first byte of an answer."""

_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
"""Base of every error of the HTTP library; its name depends on huggingface_hub's version."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model at one commit.

    Args:
        name: in the repository.
        size: bytes.
        sha256: of its contents; None where the Hub has none (it has one for weights).
    """

    name: str
    size: int
    sha256: str | None


class HubRepository:
    """A model's files at one commit. Thread-safe.

    Args:
        model: on the Hub.
        commit: full hash.
    """

    def __init__(self, model: HubModel, commit: str) -> None:
        disable_progress_bars()  # edgemoe shows one bar for all files
        self.model, self.commit = model, commit

    @classmethod
    def find(cls, model: HubModel) -> tuple[HubRepository, set[str]]:
        """Opens the repository at the revision's present commit; returns it and the names of its files.

        Raises:
            UserError: there is no such model or revision, it is gated, or the Hub cannot be reached.
        """
        with _errors(model):
            found = HfApi().model_info(model.repo, revision=model.revision, timeout=TIMEOUT)
        if not found.sha:
            raise UserError(f"a commit of {model.name} from the Hub", "none", "try again later")
        return cls(model, found.sha), {file.rfilename for file in found.siblings or []}

    def file(self, name: str) -> RemoteFile:
        """Looks up size and hash of a file.

        Raises:
            UserError: from find.
        """
        with _errors(self.model):
            found = get_hf_file_metadata(self._url(name), timeout=TIMEOUT, headers=self._headers())
        if found.size is None:
            raise UserError(f"the size of {name} of {self.model.name} from the Hub", "none", "try again")
        sha256 = found.etag if found.etag and _SHA256.fullmatch(found.etag) else None
        return RemoteFile(name, found.size, sha256)

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
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise UserError(wanted, "the whole file", "set HF_ENDPOINT to a server that serves ranges")
            raw = bytes(response.read())
        if len(raw) != end - start:
            raise DamagedData(wanted, f"{len(raw)} bytes", "try again")
        return raw

    def download(self, file: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
        """Completes `part` to the whole file, resuming an interrupted call, and checks its hash.

        Args:
            file: of this repository.
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
                        cast(BinaryIO, _Counting(out, progress)),
                        resume_size=have,
                        headers=self._headers(),
                        expected_size=file.size,
                    )
        found = _sha256(part) if file.sha256 else None
        if found != file.sha256:
            part.unlink()
            raise DamagedData(
                f"{file.name} of {self.model.name} with sha256 {file.sha256}",
                f"sha256 {found}",
                "run the same command again: it downloads the file again",
            )

    def _url(self, name: str) -> str:
        return hf_hub_url(self.model.repo, name, revision=self.commit)

    @staticmethod
    def _headers() -> dict[str, str]:
        # A compressed response could neither be resumed nor be read in ranges.
        return build_hf_headers() | {"Accept-Encoding": "identity"}


class _Counting:
    """A file that reports written bytes to `progress`."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file, self._progress = file, progress

    def write(self, data: bytes) -> int:
        self._progress(len(data))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
