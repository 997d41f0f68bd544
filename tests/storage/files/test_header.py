"""storage/files/header.py against the safetensors library, and with headers that contradict their file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from edgemoe.errors import BadHeader, MissingTensor, TruncatedFile
from edgemoe.storage.files import header as header_module
from edgemoe.storage.files.header import DTYPE_BITS, HEADER_LIMIT, header_bytes, read_header


def a_file(path: Path, header: object, data: int = 0, length: int | None = None) -> Path:
    """Writes a file of this header, bytes or a value for JSON, and `data` bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data))
    return path


def tensor(*offsets: int, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [offsets[1] - offsets[0]] if shape is None else shape,
        "data_offsets": [*offsets],
    }


def test_reads_files_of_the_library(tmp_path):
    """Names, shapes, metadata and the bytes of each tensor are as the library wrote them."""
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.uint8),
        "empty": np.zeros((0, 3), np.int64),
        "scalar": np.array(7, np.int16),
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path, metadata={"k": "v"})
    header, raw = read_header(path), path.read_bytes()
    assert header.metadata == {"k": "v"}
    assert {name: entry.shape for name, entry in header.tensors.items()} == {
        n: a.shape for n, a in arrays.items()
    }
    for name, entry in header.tensors.items():
        assert raw[entry.range.offset : entry.range.end] == arrays[name].tobytes()


def test_the_library_reads_written_files(tmp_path):
    """A written header is padded to a block, and the library reads every tensor after it."""
    header = header_bytes({"ä": ("U8", [3]), "b": ("F32", [2, 1])}, {"k": "v"})
    assert len(header) == 4096
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes([1, 2, 3]) + np.array([[0.5], [-2]], "<f4").tobytes())
    loaded = load_file(path)
    assert {name: array.tolist() for name, array in loaded.items()} == {"ä": [1, 2, 3], "b": [[0.5], [-2]]}
    assert read_header(path).data_start == 4096
    assert read_header(path).metadata == {"k": "v"}


def test_data_of_a_long_header_starts_on_a_block_too():
    """A header of any length is padded to the next multiple of a block."""
    for n in range(1, 400, 7):
        header = header_bytes({"n" * 40 + str(i): ("BF16", [4]) for i in range(n)}, {})
        assert len(header) % 4096 == 0
        assert len(header) - len(header.rstrip(b" ")) < 4096


OK = {"t": tensor(0, 4)}
FAULTS = {
    "is no JSON": b"{]",
    "is no UTF-8": b'{"\xff":1}',
    "is a list": [],
    "has a key twice": b'{"t":%b,"t":%b}' % ((json.dumps(tensor(0, 4)).encode(),) * 2),
    "has an inner key twice": b'{"t":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "nests deeply": b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "has a number of many digits": b'{"t":{"dtype":"U8","shape":[%b],"data_offsets":[0,4]}}' % (b"9" * 5000),
    "has half a surrogate": b'{"\\ud800":%b}' % json.dumps(tensor(0, 4)).encode(),
    "has a tensor that is none": {"t": 3},
    "lacks the dtype": {"t": {"shape": [4], "data_offsets": [0, 4]}},
    "has a key too many": {"t": tensor(0, 4) | {"x": 1}},
    "has an unknown dtype": {"t": tensor(0, 4, dtype="U9")},
    "has a dtype that is a list": {"t": tensor(0, 4, dtype=[])},
    "has a negative dimension": {"t": tensor(0, 4, shape=[-2, -2])},
    "has a true dimension": {"t": tensor(0, 4, shape=[4, True])},
    "has a fractional dimension": {"t": tensor(0, 4, shape=[4.0])},
    "has NaN": {"t": tensor(0, 4, shape=[float("nan")])},
    "overflows 64 bits to the right size": {"t": tensor(0, 4, shape=[2**62 + 1, 4])},
    "has a dimension past 64 bits": {"t": tensor(0, 4, shape=[2**64, 0])},
    "has too many dimensions": {"t": tensor(0, 4, shape=[4] + [1] * 64)},
    "has a size other than its range": {"t": tensor(0, 4, shape=[3])},
    "has a range backwards": {"t": tensor(4, 0, shape=[0])},
    "has a negative offset": {"t": tensor(-4, 0, shape=[4])},
    "has three offsets": {"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}},
    "overlaps": {"t": tensor(0, 3), "u": tensor(2, 4)},
    "has the same bytes twice": {"t": tensor(0, 4), "u": tensor(0, 4)},
    "leaves a hole": {"t": tensor(0, 1), "u": tensor(2, 4)},
    "begins with a hole": {"t": tensor(1, 4)},
    "leaves bytes at the end": {"t": tensor(0, 3)},
    "names no tensor": {},
    "has metadata of numbers": OK | {"__metadata__": {"a": 1}},
    "has metadata that is a list": OK | {"__metadata__": []},
}


@pytest.mark.parametrize("header", FAULTS.values(), ids=FAULTS)
def test_a_header_that_contradicts_its_file_is_refused(tmp_path, header):
    """Every fault raises BadHeader with the file's name."""
    path = a_file(tmp_path / "x.safetensors", header, data=4)
    with pytest.raises(BadHeader, match=r"x\.safetensors"):
        read_header(path)


def test_the_base_of_the_broken_headers_is_accepted(tmp_path):
    """The common base of the broken headers is accepted, so each is refused for its own fault."""
    path = a_file(tmp_path / "x.safetensors", OK | {"__metadata__": {"a": "b"}}, data=4)
    assert read_header(path).tensors["t"].range.length == 4


@pytest.mark.parametrize("depth", range(940, 1010, 3))
def test_depth_near_the_interpreters_limit_is_refused(tmp_path, depth):
    """JSON nested too deeply for the parser or for repr is refused."""
    with pytest.raises(BadHeader):
        read_header(a_file(tmp_path / "x", b'{"t":' + b"[" * depth + b"]" * depth + b"}"))


def test_json_too_deep_for_repr_is_refused(tmp_path, monkeypatch):
    """JSON that parses but is too deep for repr raises BadHeader."""

    def too_deep(value: object) -> str:
        raise RecursionError

    monkeypatch.setattr(header_module, "shortened", too_deep)
    with pytest.raises(BadHeader, match="nested too deeply"):
        read_header(a_file(tmp_path / "x", {"t": [[[]]]}))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 1000])
def test_a_length_past_the_file_or_the_limit_is_refused(tmp_path, length):
    """An impossible header length is refused before a read of that size."""
    with pytest.raises(BadHeader, match=str(length)):
        read_header(a_file(tmp_path / "x", OK, data=4, length=length))


def test_a_header_over_the_limit_is_refused_even_if_it_is_there(tmp_path):
    """A header of more than HEADER_LIMIT is refused, even in a sparse file that has the bytes."""
    path = a_file(tmp_path / "x", OK, length=HEADER_LIMIT + 1)
    with path.open("r+b") as file:
        file.truncate(2 * HEADER_LIMIT)
    with pytest.raises(BadHeader, match=f"{HEADER_LIMIT} are allowed"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_shorter_than_a_length_is_truncated(tmp_path, size):
    """A file of less than eight bytes is truncated."""
    path = tmp_path / "x"
    path.write_bytes(bytes(size))
    with pytest.raises(TruncatedFile, match=f"{size} bytes"):
        read_header(path)


def test_missing_data_is_truncation_and_a_missing_file_named(tmp_path):
    """A file that ends inside its last tensor is truncated; a file that does not exist is missing."""
    with pytest.raises(TruncatedFile, match=r"got \d+ bytes"):
        read_header(a_file(tmp_path / "x", OK, data=3))
    with pytest.raises(MissingTensor, match="nowhere"):
        read_header(tmp_path / "nowhere")


GOOD = header_bytes({"a": ("F32", [2, 3]), "b": ("U8", [5]), "c": ("BF16", [0])}, {"k": "v"}, 8) + bytes(29)


@pytest.mark.e2e
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, len(GOOD)),
)
def test_mutations_raise_no_other_error(tmp_path, changes, cut):
    """A header with changed bytes, whole or cut, is read consistently or refused, with no other error."""
    raw = bytearray(GOOD)
    for at, byte in changes:
        raw[at] = byte
    path = tmp_path / "x"
    for content in (raw, raw[:cut]):
        path.write_bytes(content)
        try:
            header = read_header(path)
        except (BadHeader, TruncatedFile):
            continue
        assert (
            sum(entry.range.length for entry in header.tensors.values()) == len(content) - header.data_start
        )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(sorted(DTYPE_BITS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = (
    st.fixed_dictionaries({}, optional={"dtype": values, "shape": values, "data_offsets": values}) | values
)


@pytest.mark.e2e
@settings(max_examples=48, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries, max_size=3), st.integers(0, 9))
def test_any_json_raises_no_other_error(tmp_path, content, data):
    """JSON of any shape is read consistently or refused."""
    path = a_file(tmp_path / "x", content, data=data)
    try:
        header = read_header(path)
    except (BadHeader, TruncatedFile):
        return
    assert sum(entry.range.length for entry in header.tensors.values()) == data
