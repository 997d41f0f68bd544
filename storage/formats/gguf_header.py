"""The header of a GGUF file: counts, lengths and offsets are bounded before use.

"GGUF" | version u32 | tensors u64 | fields u64
field:   key | type u32 | value                          strings are u64 bytes, then UTF-8
tensor:  name | dimensions u32 | sizes u64 ... | type u32 | offset u64
data, from the next multiple of general.alignment on
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from edgemoe.errors import BadHeader, TruncatedFile
from edgemoe.storage.base import ByteRange
from edgemoe.storage.files.retry import open_regular, read_errors
from edgemoe.storage.files.untrusted import shortened

HEADER_LIMIT = 64 << 20
"""Bytes. A vocabulary takes several megabytes."""

MAX_VALUES = 1 << 21
"""Values of all lists. The tokens, scores, types and merges of the largest known vocabulary are 1.3 million."""

_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_SIZE = 1 << 50
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_ACTION = "download the file again"


@dataclass(frozen=True)
class GgufEntry:
    """Type, shape and place of a tensor.

    Args:
        type: the type of its stored weights.
        shape: outermost dimension first, as in torch; the file has the reverse order.
        range: bytes, counted from the start of the file.
    """

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    range: ByteRange

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the last dimension."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(self.shape[-1] // block * size)


@dataclass(frozen=True)
class GgufHeader:
    """The contents of a GGUF header.

    Args:
        fields: texts, numbers, booleans and lists of them, by key.
        tensors: name -> entry.
    """

    fields: dict[str, Any]
    tensors: dict[str, GgufEntry]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads and checks a file's header, without its data.

    Raises:
        BadHeader: with the file and the wrong value.
        TruncatedFile: the file ends inside the header or before the last tensor.
        MissingTensor: the file does not exist.
        ReadFailed: the operating system refuses a read.
    """
    with read_errors(f"a GGUF file {path}", _ACTION), BufferedReader(open_regular(path)) as file:
        return parse_gguf_header(str(path), file)


def parse_gguf_header(name: str, file: BinaryIO) -> GgufHeader:
    """Reads and checks the header of an open file; reads no data, and seeks its end for the size alone.

    Args:
        name: the name of the file, for errors.
        file: buffered.

    Raises:
        BadHeader, TruncatedFile: as read_gguf_header.
    """
    return _Parser(name, file).header()


class _Parser:
    """Reads the header of one open file from start to end, once."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._path, self._file, self._values = name, file, 0
        self._size = file.seek(0, 2)
        file.seek(0)

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise self._bad("a file that does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise self._bad(f"version {version}, not 2 or 3")
        tensor_count, field_count = self._number("Q"), self._number("Q")
        if tensor_count > _MAX_TENSORS or field_count > _MAX_FIELDS:
            raise self._bad(f"{tensor_count} tensors and {field_count} fields")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._text()
            if key in fields:
                raise self._bad(f"field {shortened(key)} twice")
            fields[key] = self._value(self._number("I"))
        alignment = fields.get("general.alignment", gguf.constants.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment {shortened(alignment)}")
        relative = [self._tensor() for _ in range(tensor_count)]
        names = [name for name, _ in relative]
        if len(set(names)) < len(names):
            raise self._bad(f"tensor {shortened(max(names, key=names.count))} twice")
        start = -(-self._file.tell() // alignment) * alignment
        return GgufHeader(fields, self._placed(relative, start, alignment))

    def _placed(
        self, relative: list[tuple[str, GgufEntry]], start: int, alignment: int
    ) -> dict[str, GgufEntry]:
        """Returns tensors by name after a check that they lie one after another inside the file."""
        at, out = start, {}
        for name, entry in sorted(relative, key=lambda item: item[1].range):
            offset, length = start + entry.range.offset, entry.range.length
            if offset != at:
                raise self._bad(f"tensor {shortened(name)} at {offset} instead of {at}")
            if offset + length > self._size:
                raise TruncatedFile(
                    f"{offset + length} bytes in {self._path}, as its header says",
                    f"{self._size} bytes",
                    _ACTION,
                )
            out[name] = GgufEntry(entry.type, entry.shape, ByteRange(offset, length))
            at = offset + -(-length // alignment) * alignment
        return out

    def _tensor(self) -> tuple[str, GgufEntry]:
        name = self._text()
        label = f"tensor {shortened(name)}"
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._bad(f"{label} of {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise self._bad(f"{label} of unknown type {number}") from error
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if not 0 < prod(shape) <= _MAX_SIZE or offset > _MAX_SIZE or shape[-1] % block:
            raise self._bad(f"{label} of type {kind.name} and shape {shortened(shape)} at {offset}")
        return name, GgufEntry(kind, shape, ByteRange(offset, prod(shape) // block * size))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._bad(f"a field of unknown type {kind}")
        of, count = self._number("I"), self._number("Q")
        self._values += count
        if self._values > MAX_VALUES:
            raise self._bad(f"lists of {self._values} values, where {MAX_VALUES} are allowed")
        if of == _STRING:
            return [self._text() for _ in range(count)]
        if of not in _SCALARS:
            raise self._bad(f"a list with values of type {of}")
        code = "u1" if of == _BOOL else _SCALARS[of]
        dtype = np.dtype(code).newbyteorder("<")
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _text(self) -> str:
        raw = self._take(self._number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"a text that is not UTF-8 ({shortened(raw)})") from error

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, size: int) -> bytes:
        at = self._file.tell()
        if size > HEADER_LIMIT - at:
            raise self._bad(f"{size} bytes at {at}, where {HEADER_LIMIT} are allowed for the header")
        wanted = f"{size} bytes of header at {at} in {self._path}"
        if size > self._size - at:
            raise TruncatedFile(wanted, f"{self._size} bytes in all", _ACTION)
        raw = self._file.read(size)
        if len(raw) < size:
            raise TruncatedFile(wanted, f"{len(raw)} bytes", _ACTION)
        return raw

    def _bad(self, finding: str) -> BadHeader:
        return BadHeader(f"a valid GGUF header in {self._path}", finding, _ACTION)
