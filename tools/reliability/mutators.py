"""Seeded changes of files as hostile or damaged ones have them: of bytes, of JSON, and of headers in front of data."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 3, 7, 31, 255, 4096, 65_535, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 53),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 31), -(1 << 63), 10**30, -(10**30)),
    *(0.0, -0.0, 0.5, -0.5, 1.5, 1e-320, 1e-30, 1e30, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "-1",
        "true",
        "null",
        "auto",
        "yarn",
        "silu",
        "relu2",
        "float16",
        "full_attention",
    ),
    *("\x00", "\x1b[2J\x1b]0;x\x07", "\u202e\u200b\ufeff", "\x9b31m", "\ud800", "\U0001f4a5" * 70, "a\nb"),
    *("..", "../x", "/etc/hostname", "a/b", "C:\\x", "%s{0}{layer}", "{{ 1 }}", "a" * 300, "b" * 5000),
    *("model.safetensors", "config.json", "tokenizer.json", "dense.safetensors"),
)
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"": None}, [1, 2], ["x"], {"x": 1}, [{}], {"a": {"b": []}}),
    *(list(range(3)), [-1] * 5, ["a"] * 100, {"rope_type": "yarn"}, {"rope_type": 7, "factor": "x"}),
)
"""Values of other types than the one that a key expects."""

_DEEP = 100_000
"""Nested lists of the deepest value; a recursive parser ends far before."""

_RAW = ("[" * _DEEP, "[" * 900 + "]" * 900, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000, "-" + "9" * 400)
"""Values as JSON text that Python's json does not write."""

_MARK = "\x01raw%d\x01"
_MARKED = re.compile(r'"\\u0001raw(\d)\\u0001"')

Place = tuple[Any, Any]
"""A container, and the key or index of a value in it."""


def mutate_bytes(raw: bytes, random: Random) -> bytes:
    """Changes one to three parts of a file's bytes."""
    out = bytearray(raw)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_BYTES)(out, random)
    return bytes(out)


def mutate_json(value: Any, random: Random) -> bytes:
    """Changes one to three values of parsed JSON, which itself stays; returns UTF-8 text that may not parse."""
    root = [deepcopy(value)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not (places := list(_places(root))):
            break
        random.choice(_CHANGES)(*random.choice(places), random, places)
    text = json.dumps(root[0]) if root else ""
    if text.startswith('{"') and random.random() < 0.03:  # a key twice
        text = f"{text[: text.index(':')]}: {json.dumps(_hostile(random))}, {text[1:]}"
    text = _MARKED.sub(lambda match: _RAW[int(match[1])], text)
    raw = text.encode()
    return mutate_bytes(raw, random) if random.random() < 0.05 else raw


def mutate_safetensors(raw: bytes, random: Random) -> bytes:
    """Changes the JSON of a safetensors header, its length, or any bytes of the file."""
    if random.random() < 0.2:
        return mutate_bytes(raw, random)
    end = 8 + int.from_bytes(raw[:8], "little")
    text, data = mutate_json(json.loads(raw[8:end]), random), raw[end:]
    length = len(text)
    if random.random() < 0.1:
        length = random.choice((0, 1, length - 1, length + 1, 1 << 25, 1 << 62, (1 << 64) - 1))
    if random.random() < 0.1:
        data = data[: random.randrange(len(data) + 1)]
    return max(length, 0).to_bytes(8, "little") + text + data


def mutate_gguf(fields: Mapping[str, Any], tensors: Mapping[str, Any], data: bytes, random: Random) -> bytes:
    """Changes fields and tensors of a GGUF file, or any bytes of it.

    Args:
        fields: values by key.
        tensors: name -> [sizes as the file has them, number of the type, offset].
        data: bytes after the header.
        random: chooses the changes.
    """
    root = [{"fields": dict(fields), "tensors": {name: list(entry) for name, entry in tensors.items()}}]
    root = deepcopy(root)
    if random.random() < 0.2:
        return mutate_bytes(gguf_bytes(root[0]["fields"], root[0]["tensors"], data), random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not (places := [place for place in _places(root[0]) if place[0] is not root[0]]):
            break
        random.choice(_CHANGES)(*random.choice(places), random, places)
    try:
        return gguf_bytes(root[0]["fields"], root[0]["tensors"], data)
    except (struct.error, TypeError, ValueError, KeyError, UnicodeEncodeError):
        return mutate_bytes(gguf_bytes(fields, tensors, data), random)


def gguf_bytes(fields: Mapping[str, Any], tensors: Mapping[str, Any], data: bytes) -> bytes:
    """A GGUF file of version 3.

    Raises:
        struct.error, TypeError, ValueError: a value that the format cannot express.
    """
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    out += b"".join(_gguf_text(key) + _gguf_value(value) for key, value in fields.items())
    for name, (sizes, kind, offset) in tensors.items():
        out += _gguf_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return out + bytes(-len(out) % 32) + data


def _gguf_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _gguf_value(value: Any) -> bytes:
    kind, raw = _gguf_typed(value)
    return struct.pack("<I", kind) + raw


def _gguf_typed(value: Any) -> tuple[int, bytes]:
    """Number of a value's type, and its bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return (4, struct.pack("<I", value)) if 0 <= value < 1 << 32 else (11, struct.pack("<q", value))
        case float():
            return (6, struct.pack("<f", value)) if abs(value) < 1e38 else (12, struct.pack("<d", value))
        case str():
            return 8, _gguf_text(value)
        case list():
            typed = [_gguf_typed(each) for each in value]
            kind = typed[0][0] if typed else 4
            return 9, struct.pack("<IQ", kind, len(typed)) + b"".join(raw for _, raw in typed)
    raise TypeError(f"{type(value)} in a GGUF field")


def _places(root: Any) -> Iterator[Place]:
    """Every value in nested containers, with its place."""
    items = list(root.items()) if isinstance(root, dict) else list(enumerate(root))
    for key, value in items:
        yield root, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _hostile(random: Random) -> Any:
    kind = random.randrange(8)
    if kind < 3:
        return random.choice(NUMBERS)
    if kind < 5:
        return random.choice(TEXTS)
    return deepcopy(random.choice(HOSTILE)) if kind < 7 else _MARK % random.randrange(len(_RAW))


def _replace(holder: Any, key: Any, random: Random, places: list[Place]) -> None:
    holder[key] = _hostile(random)


def _shift(holder: Any, key: Any, random: Random, places: list[Place]) -> None:
    """Changes a number a little, or a text by one character; any other value as _replace."""
    old = holder[key]
    if isinstance(old, str) and old:
        at = random.randrange(len(old))
        holder[key] = old[:at] + random.choice(TEXTS)[:3] + old[at + random.randrange(2) :]
    elif isinstance(old, int | float) and not isinstance(old, bool):
        changes = (-old, old + 1, old - 1, old * 2, old // 2, old * 1000, float(old), str(old), [old])
        holder[key] = random.choice(changes)
    else:
        holder[key] = _hostile(random)


def _drop(holder: Any, key: Any, random: Random, places: list[Place]) -> None:
    del holder[key]


def _add(holder: Any, key: Any, random: Random, places: list[Place]) -> None:
    """Adds a value next to another one: a further key, or a further item."""
    if isinstance(holder, dict):
        holder[random.choice((*TEXTS, *(str(other) for _, other in places)))] = _hostile(random)
    else:
        holder.insert(key, _hostile(random))


def _rename(holder: Any, key: Any, random: Random, places: list[Place]) -> None:
    if isinstance(holder, dict):
        holder[random.choice((*TEXTS, f"{key}{random.choice(TEXTS)}"))] = holder.pop(key)


def _swap(holder: Any, key: Any, random: Random, places: list[Place]) -> None:
    """Exchanges two values, neither of which may contain the other: both are copied."""
    other, at = random.choice(places)
    holder[key], other[at] = deepcopy(other[at]), deepcopy(holder[key])


_CHANGES: tuple[Callable[[Any, Any, Random, list[Place]], None], ...] = (
    *(_replace, _replace, _replace, _shift, _shift, _drop, _add, _rename, _swap),
)


def _flip(out: bytearray, random: Random) -> None:
    for _ in range(random.choice((1, 2, 8))):
        if out:
            out[random.randrange(len(out))] ^= 1 << random.randrange(8)


def _cut(out: bytearray, random: Random) -> None:
    del out[random.randrange(len(out) + 1) :]


def _insert(out: bytearray, random: Random) -> None:
    at = random.randrange(len(out) + 1)
    out[at:at] = random.choice(
        (random.randbytes(random.randrange(1, 40)), bytes(16), b"[" * 2000, b"\xff" * 8)
    )


def _splice(out: bytearray, random: Random) -> None:
    """Copies a part of the file over another one."""
    if out:
        begin, at = random.randrange(len(out)), random.randrange(len(out))
        part = out[begin : begin + random.randrange(1, 200)]
        out[at : at + len(part)] = part


def _integer(out: bytearray, random: Random) -> None:
    """Writes an extreme integer of 4 or 8 bytes, most often near the start, where headers have their counts."""
    size = random.choice((4, 8))
    value = random.choice((0, 1, 255, 1 << 31, -1, -2, (1 << 63) - 1, 1 << 40)) % (1 << (8 * size))
    at = random.choice((0, 4, 8, 16, 24, random.randrange(len(out) + 1)))
    out[at : at + size] = value.to_bytes(size, "little")


_BYTES: tuple[Callable[[bytearray, Random], None], ...] = (_flip, _cut, _insert, _splice, _integer)
