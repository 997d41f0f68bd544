"""storage/header.py against the safetensors library, and against headers that lie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from storage import header as header_module
from storage.errors import BadHeader, MissingTensor, TruncatedFile
from storage.header import DTYPE_BITS, header_bytes, read_header


def a_file(path: Path, header: object, data: int = 0, length: int | None = None) -> Path:
    """A file of this header (bytes, or what becomes JSON) and so many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data))
    return path


def tensor(*offsets: int, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [offsets[1] - offsets[0]] if shape is None else shape,
        "data_offsets": [*offsets],
    }


def test_reads_what_the_library_writes(tmp_path):
    """Names, dtypes, shapes, metadata and the very bytes of each tensor are as the library wrote them."""
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


def test_the_library_reads_what_is_written(tmp_path):
    """A written header is padded to the block, and the library finds every tensor behind it."""
    header = header_bytes({"ä": ("U8", [3]), "b": ("F32", [2, 1])}, {"k": "v"})
    assert len(header) == 4096
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes([1, 2, 3]) + np.array([[0.5], [-2]], "<f4").tobytes())
    loaded = load_file(path)
    assert {name: array.tolist() for name, array in loaded.items()} == {"ä": [1, 2, 3], "b": [[0.5], [-2]]}
    assert read_header(path).data_start == 4096
    assert read_header(path).metadata == {"k": "v"}


def test_data_of_a_long_header_starts_on_a_block_too():
    """However long the names are, the header is a multiple of the block, and never a whole block longer."""
    for n in range(1, 400, 7):
        header = header_bytes({"n" * 40 + str(i): ("BF16", [4]) for i in range(n)}, {})
        assert len(header) % 4096 == 0
        assert len(header) - len(header.rstrip(b" ")) < 4096


OK = {"t": tensor(0, 4)}
LIES = {
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


@pytest.mark.parametrize("header", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused(tmp_path, header):
    """Each lie raises BadHeader, which names the file."""
    path = a_file(tmp_path / "x.safetensors", header, data=4)
    with pytest.raises(BadHeader, match=r"x\.safetensors"):
        read_header(path)


def test_the_header_the_lies_vary_is_good(tmp_path):
    """What every lie above starts from is accepted, so each is refused for its lie."""
    path = a_file(tmp_path / "x.safetensors", OK | {"__metadata__": {"a": "b"}}, data=4)
    assert read_header(path).tensors["t"].range.length == 4


@pytest.mark.parametrize("depth", range(940, 1010, 3))
def test_depth_near_the_interpreters_limit_is_refused(tmp_path, depth):
    """JSON nested so deeply that only reading or only printing it fails is refused all the same."""
    with pytest.raises(BadHeader):
        read_header(a_file(tmp_path / "x", b'{"t":' + b"[" * depth + b"]" * depth + b"}"))


def test_json_too_deep_to_be_named_is_refused(tmp_path, monkeypatch):
    """An interpreter that parses deeper than it prints still gives BadHeader."""

    def too_deep(value: object) -> str:
        raise RecursionError

    monkeypatch.setattr(header_module, "shortened", too_deep)
    with pytest.raises(BadHeader, match="nested too deeply"):
        read_header(a_file(tmp_path / "x", {"t": [[[]]]}))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 1000])
def test_a_length_past_the_file_or_the_limit_is_refused(tmp_path, length):
    """A header length that cannot be is refused before anything of that size is read."""
    with pytest.raises(BadHeader, match=str(length)):
        read_header(a_file(tmp_path / "x", OK, data=4, length=length))


def test_a_header_over_the_limit_is_refused_even_if_it_is_there(tmp_path):
    """100 MB is the limit, also in a (sparse) file that has more."""
    path = a_file(tmp_path / "x", OK, length=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    with pytest.raises(BadHeader, match="100000000 are allowed"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_shorter_than_a_length_is_truncated(tmp_path, size):
    """Eight bytes are the least a safetensors file has."""
    path = tmp_path / "x"
    path.write_bytes(bytes(size))
    with pytest.raises(TruncatedFile, match=f"{size} bytes"):
        read_header(path)


def test_missing_data_is_truncation_and_a_missing_file_named(tmp_path):
    """A file that ends before its last tensor does is truncated; one that is not there is missing."""
    with pytest.raises(TruncatedFile, match="it has"):
        read_header(a_file(tmp_path / "x", OK, data=3))
    with pytest.raises(MissingTensor, match="nowhere"):
        read_header(tmp_path / "nowhere")


GOOD = header_bytes({"a": ("F32", [2, 3]), "b": ("U8", [5]), "c": ("BF16", [0])}, {"k": "v"}, 8) + bytes(29)


@pytest.mark.e2e
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, len(GOOD)),
)
def test_mutations_raise_nothing_else(tmp_path, changes, cut):
    """A header with changed bytes, whole or cut, is read or refused; no other error, and never a lie."""
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
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries, max_size=3), st.integers(0, 9))
def test_any_json_raises_nothing_else(tmp_path, content, data):
    """JSON of any shape is read or refused."""
    path = a_file(tmp_path / "x", content, data=data)
    try:
        header = read_header(path)
    except (BadHeader, TruncatedFile):
        return
    assert sum(entry.range.length for entry in header.tensors.values()) == data
