"""The choice of torch's build, and the size that an installation downloads."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools import torch_build
from tools.checkout import ROOT
from tools.torch_build import CPU_INDEX, VERSION, choose, size_of, summary

CPU = f"torch=={VERSION}+cpu"


def package(name, version, url):
    """A package in pip's report."""
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": url}}


@pytest.mark.parametrize(
    ("build", "offers", "name"),
    [
        ("cpu", lambda arguments: CPU in arguments, [CPU]),
        ("cpu", lambda arguments: CPU_INDEX in arguments, [CPU, "--extra-index-url", CPU_INDEX]),
        ("cpu", lambda arguments: CPU not in arguments, [f"torch=={VERSION}"]),
        ("cpu", lambda arguments: False, []),
        ("cuda", lambda arguments: True, []),
    ],
)
def test_the_first_build_that_an_index_has(build, offers, name):
    """The configured index goes first, then PyTorch's, then any torch; with CUDA the dependencies bring it."""
    found = [package("torch", VERSION, "file:///torch.whl")]
    assert choose(build, lambda arguments: found if offers(arguments) else None)[0] == name


def test_the_size_is_that_of_the_files(tmp_path):
    """Files on disk and at a server are counted; a directory is 0, and a dead server is unknown."""
    (tmp_path / "a b.whl").write_bytes(b"x" * 1234)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert size_of((tmp_path / "a b.whl").as_uri()) == 1234
        assert size_of(f"{address}/a%20b.whl") == 1234
        assert size_of(f"{address}/none.whl") is None
        assert size_of(tmp_path.as_uri()) == 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert size_of(f"{address}/a%20b.whl") is None
    found = [package(name, "1", "") for name in ("torch", "numpy", "lost")]
    line = "2.7 GB to download (torch 1 2.7 GB, numpy 1 20 MB; 3 packages), and 1 packages of unknown size"
    assert summary(found, [2_700_000_000, 20_000_000, None]) == line


def test_an_unknown_build_and_an_installed_torch(capsys):
    """A wrong name is refused with the choices; where torch is installed nothing is resolved."""
    assert torch_build.main("gpu") == 2
    assert "expected TORCH_BUILD=auto, cpu, cuda, got 'gpu'" in capsys.readouterr().err
    assert torch_build.main("auto") == 0
    assert capsys.readouterr() == ("", "")
    assert torch_build.main("cuda") == 0
    assert "torch is installed already" in capsys.readouterr().err


def test_the_tool_runs_without_packages():
    """It starts in an empty environment: only Python's own modules are imported."""
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "torch_build.py"), "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "got 'nothing'" in done.stderr) == (2, True)
