"""Copies a GGUF with other tensors and numbers in the places of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Replaced = tuple[NDArray[Any], Kind]
"""The bytes of a tensor's rows, or its numbers, and its type."""


def rewrite(
    reader: gguf.GGUFReader,
    into: Path,
    replace: Callable[[gguf.ReaderTensor], Replaced | None],
    fields: Mapping[str, int | list[str]] = MappingProxyType({}),
) -> None:
    """Writes a copy of a GGUF.

    Args:
        reader: the file that is copied.
        into: path of the new file.
        replace: returns what a tensor becomes; None: it stays.
        fields: entries of the header that differ, by name; lists of strings may be new.
    """
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(into, architecture)
    for name, field in reader.fields.items():
        if name == gguf.Keys.General.ARCHITECTURE or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, fields.get(name, field.contents()), kind, sub_type=inner)
    for name, strings in fields.items():
        if name not in reader.fields:
            writer.add_array(name, strings)
    for tensor in reader.tensors:
        data, kind = replace(tensor) or (tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
