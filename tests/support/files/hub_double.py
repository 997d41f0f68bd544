"""A double of the Hugging Face Hub: one repository over HTTP, with ranges, faults and broken connections."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants, hf_api

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def point(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Points huggingface_hub, which has read HF_ENDPOINT already, at another server."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hf_api.constants, "ENDPOINT", endpoint)


class HubDouble:
    """Serves the files of a directory as repository `repo` at COMMIT.

    Attributes:
        requests: (method, file, first byte of the range or None for the whole file), in order.
        cut: file -> bytes after which its next download breaks off, once.
        corrupt: files whose last byte is wrong in answers without a range.
        other_hashes: file -> the hash that the list of files has, in place of the right one.
        listing: the list of files; None: as the Hub gives it.
        down: every request is answered with 503.
        gated: every request is refused, as for a model whose terms are not accepted.
        endless: every request is answered with this status and a body without an end; 0: none is.
    """

    def __init__(self, directory: Path, repo: str) -> None:
        self.directory, self.repo = directory, repo
        self.requests: list[tuple[str, str, int | None]] = []
        self.cut: dict[str, int] = {}
        self.corrupt: set[str] = set()
        self.other_hashes: dict[str, str | None] = {}
        self.listing: object = None
        self.down, self.gated, self.endless = False, False, 0
        self.endpoint = ""

    def downloads(self, file: str) -> list[int | None]:
        """Where each request for a file's bytes began."""
        return [start for method, name, start in self.requests if method == "GET" and name == file]

    def siblings(self) -> list[dict[str, object]]:
        """The list of files with sizes and hashes; as on the Hub, weights are in LFS, with another blob id."""
        found = []
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            raw, name = path.read_bytes(), str(path.relative_to(self.directory))
            entry: dict[str, object] = {"rfilename": name, "size": len(raw)}
            if path.suffix in (".safetensors", ".gguf"):
                sha256 = self.other_hashes.get(path.name, hashlib.sha256(raw).hexdigest())
                entry |= {"blobId": "0" * 40, "lfs": {"sha256": sha256, "size": len(raw), "pointerSize": 134}}
            else:
                blob = hashlib.sha1(b"blob %d\0%b" % (len(raw), raw)).hexdigest()
                entry["blobId"] = self.other_hashes.get(path.name, blob)
            found.append(entry)
        return found

    @contextmanager
    def serving(self) -> Iterator[HubDouble]:
        """Listens on a port of its own until left."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _handler(double) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def log_message(self, *args: object) -> None:
                pass

            def _answer(self, *, body: bool) -> None:
                url = urlsplit(self.path)
                path = unquote(url.path)
                if double.endless:
                    self._send_forever(double.endless)
                elif double.down:
                    self._json(503, {"error": "down"})
                elif double.gated:
                    self._json(403, {"error": "gated"}, **{"X-Error-Code": "GatedRepo"})
                elif path in (f"/api/models/{double.repo}/revision/{r}" for r in ("main", "v1", COMMIT)):
                    files = double.siblings() if double.listing is None else double.listing
                    if parse_qs(url.query).get("blobs") != ["true"]:
                        files = [{"rfilename": file["rfilename"]} for file in double.siblings()]
                    self._json(200, {"id": double.repo, "sha": COMMIT, "siblings": files})
                elif path.startswith(f"/api/models/{double.repo}/"):
                    self._json(404, {"error": "no"}, **{"X-Error-Code": "RevisionNotFound"})
                elif path.startswith(f"/{double.repo}/resolve/{COMMIT}/"):
                    self._file(path.removeprefix(f"/{double.repo}/resolve/{COMMIT}/"), body=body)
                else:
                    self._json(404, {"error": "no"}, **{"X-Error-Code": "RepoNotFound"})

            def _send_forever(self, code: int) -> None:
                self.send_response(code)
                self.send_header("Connection", "close")
                self.end_headers()
                with suppress(OSError):  # until the other side closes the connection
                    while True:
                        self.wfile.write(b'["x",' * 20_000)
                self.close_connection = True

            def _json(self, code: int, content: object, **headers: str) -> None:
                raw = json.dumps(content).encode()
                self.send_response(code)
                for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(raw)

            def _file(self, name: str, *, body: bool) -> None:
                whole = (double.directory / name).read_bytes()
                etag = hashlib.sha256(whole).hexdigest()
                wanted_range = self.headers.get("Range")
                if name in double.corrupt and not wanted_range:
                    whole = whole[:-1] + bytes([whole[-1] ^ 1])
                first, _, last = (wanted_range or "bytes=0-").removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or len(whole)) + 1, len(whole))
                double.requests.append((self.command, name, start if wanted_range else None))
                self.send_response(206 if wanted_range else 200)
                if wanted_range:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(whole)}")
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(end - start))
                self.end_headers()
                if body:
                    part = whole[start:end]
                    # A range with an end is a look at a header; a download asks for all that is left.
                    if not last and name in double.cut:
                        part = part[: double.cut.pop(name)]
                        self.close_connection = True
                    self.wfile.write(part)

        return Handler
