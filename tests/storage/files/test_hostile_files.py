"""Pipes in place of files, and files that claim or contain far more than real ones, are refused at once."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from edgemoe.errors import BadHeader, BadManifest, ModelRefused, ReadFailed
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.files.header import HEADER_LIMIT, read_header
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.files.untrusted import CONFIG_LIMIT, read_json
from edgemoe.storage.formats.gguf_header import MAX_VALUES, read_gguf_header
from edgemoe.storage.store.manifest import MANIFEST_NAME, SIZE_LIMIT, Manifest

STORE_FILES = (
    *("store.json", "config.json", "dense.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *(
        "generation_config.json",
        "chat_template.jinja",
        "experts-00000.safetensors",
        "special_tokens_map.json",
        "other",
    ),
)

pytestmark = pytest.mark.timeout(60)


def into_pipe(path: Path) -> None:
    """Replaces a file, or nothing, by a pipe without a writer."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.e2e
@pytest.mark.parametrize("name", STORE_FILES)
def test_a_pipe_in_a_store_is_refused(run, damageable, name):
    """chat and verify end, with 2 or 4, whichever file of a store is a pipe; inspect ends, too."""
    into_pipe(damageable / name)
    code, _, err = run("chat", "--model", damageable, "--prompt", "a")
    assert code in (2, 4), err
    assert run("verify", damageable)[0] in (2, 4)
    assert run("inspect", damageable)[0] in (0, 2, 4)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
def test_a_pipe_in_a_checkpoint_is_refused(run, checkpoint, tmp_path, name):
    """convert ends with 2 or 4, and leaves no store."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    into_pipe(source / name)
    assert run("convert", source, tmp_path / "store")[0] in (2, 4)
    assert not (tmp_path / "store" / MANIFEST_NAME).exists()


def test_a_pipe_instead_of_weights_is_no_file(tmp_path):
    """Readers of headers do not wait for a writer."""
    into_pipe(tmp_path / "weights")
    for read in (read_header, read_gguf_header):
        with pytest.raises(ReadFailed, match="pipe"):
            read(tmp_path / "weights")
    with pytest.raises(OSError, match="pipe"):
        open_regular(Path("/dev/zero"))


def quickly(read: Callable[[], object], error: type[Exception], match: str) -> None:
    """`read` fails with `error` within a second and 100 MB of Python's memory."""
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(error, match=match):
        read()
    seconds, (_, peak) = time.monotonic() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1
    assert peak < 100_000_000


def sparse(path: Path, start: bytes, size: int) -> Path:
    """A file that begins with some bytes and takes no place otherwise."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path


def gguf_with(value: bytes) -> bytes:
    """A GGUF header of one field, up to the end of its value's first bytes."""
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + value


def test_bombs_in_gguf_lists_are_refused(tmp_path):
    """Lists of 33 million empty texts, of 250 million numbers, and many lists that are too long together."""
    texts = sparse(tmp_path / "texts", gguf_with(struct.pack("<IIQ", 9, 8, 33_000_000)), 270_000_000)
    quickly(lambda: read_gguf_header(texts), BadHeader, "lists of 33000000 values")
    numbers = sparse(tmp_path / "numbers", gguf_with(struct.pack("<IIQ", 9, 7, 250_000_000)), 260_000_000)
    quickly(lambda: read_gguf_header(numbers), BadHeader, "lists of 250000000 values")
    half = struct.pack("<IIQ", 9, 7, MAX_VALUES // 2 + 1) + bytes(MAX_VALUES // 2 + 1)
    both = b"GGUF" + struct.pack("<IQQQ", 3, 0, 2, 1) + b"k" + half + struct.pack("<Q", 1) + b"l" + half
    (tmp_path / "both").write_bytes(both)
    quickly(lambda: read_gguf_header(tmp_path / "both"), BadHeader, f"lists of {MAX_VALUES + 2} values")


def test_headers_and_json_beyond_the_largest_real_ones_are_refused(tmp_path, damageable):
    """A safetensors header, a config.json and a store.json that are larger than any real one are not parsed."""
    start = (HEADER_LIMIT + 1).to_bytes(8, "little") + b"{" + b" " * 100
    header = sparse(tmp_path / "header", start, HEADER_LIMIT + 9)
    quickly(lambda: read_header(header), BadHeader, "are allowed")
    sparse(tmp_path / "config.json", b"{", CONFIG_LIMIT + 1)
    quickly(lambda: read_json(tmp_path, "config.json"), ModelRefused, "config.json")
    quickly(lambda: Checkpoint.open(tmp_path), ModelRefused, "config.json")
    sparse(damageable / MANIFEST_NAME, b"{", SIZE_LIMIT + 1)
    quickly(lambda: Manifest.load(damageable), BadManifest, str(SIZE_LIMIT))


def test_real_sizes_are_below_the_limits():
    """60 layers of 384 experts in store.json, and 92,000 tensors in one header, have room to spare."""
    record = [2**40, *["0123456789abcdef"] * 3]
    layers = {str(i): {"file": f"experts-{i:05}.safetensors", "records": [record] * 384} for i in range(60)}
    assert 4 * len(json.dumps({"layers": layers}, separators=(",", ":"))) < SIZE_LIMIT
    name, entry = (
        "model.layers.60.mlp.experts.255.gate_proj.weight_scale_inv",
        {"dtype": "F8_E4M3", "shape": [7168, 2048]},
    )
    one = json.dumps({name: entry | {"data_offsets": [10**12, 10**12]}}, separators=(",", ":"))
    assert 2 * 92_000 * len(one) < HEADER_LIMIT
