"""A corpus of broken checkpoints and stores: each entry says what is wrong with it and makes it so.

Run as a script it writes them all, for other programs to be tried on:
`python tests/support/files/broken_files.py DIRECTORY`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_checkpoint

FIRST, SECOND = small_checkpoint.SHARDS
INDEX = small_checkpoint.INDEX
Break = Callable[[Path], object]


def edit(name: str, change: Callable[[Any], object]) -> Break:
    """Rewrites a JSON file with the changes of `change`."""

    def do(directory: Path) -> None:
        parsed = json.loads((directory / name).read_text())
        change(parsed)
        (directory / name).write_text(json.dumps(parsed))

    return do


def content(name: str, raw: bytes) -> Break:
    """Puts other bytes into a file."""
    return lambda directory: (directory / name).write_bytes(raw)


def patch(name: str, offset: int, raw: bytes) -> Break:
    """Overwrites some bytes of a file; a negative offset counts from its end."""

    def do(directory: Path) -> None:
        whole = bytearray((directory / name).read_bytes())
        at = offset % len(whole)
        whole[at : at + len(raw)] = raw
        (directory / name).write_bytes(whole)

    return do


def cut(name: str, size: int) -> Break:
    """Shortens a file; a negative size counts from its end."""
    return lambda directory: os.truncate(directory / name, size % (directory / name).stat().st_size)


def header(name: str, change: Callable[[Any], object]) -> Break:
    """Rewrites a safetensors header and leaves the data as it is."""

    def do(directory: Path) -> None:
        raw = (directory / name).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        parsed = json.loads(raw[8:end])
        change(parsed)
        text = json.dumps(parsed).encode()
        (directory / name).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    return do


def put(*path: Any) -> Callable[[Any], None]:
    """Returns a change that sets the last item of `path` at the place of the items before it."""
    *keys, last, value = path

    def change(parsed: Any) -> None:
        for key in keys:
            parsed = parsed[key]
        parsed[last] = value

    return change


def link(name: str, target: str) -> Break:
    """Makes a file a link to somewhere else."""

    def do(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(target)

    return do


NORM = "model.norm.weight"
CHECKPOINTS: dict[str, tuple[Break, int]] = {
    "config.json is empty": (content("config.json", b""), 2),
    "config.json is a list": (content("config.json", b"[]"), 2),
    "config.json is no UTF-8": (content("config.json", b'{"model_type": "\xff"}'), 2),
    "config.json nests a hundred thousand lists": (content("config.json", b"[" * 100_000), 2),
    "config.json is a directory": (lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()), 4),
    "config.json links to a file outside": (link("config.json", "/etc/hostname"), 2),
    "config.json links to itself": (link("config.json", "config.json"), 2),
    "the tokenizer asks for remote code": (
        content("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'),
        2,
    ),
    "a config of a billion layers": (edit("config.json", put("num_hidden_layers", 10**9)), 2),
    "a config of a billion experts": (edit("config.json", put("num_experts", 10**9)), 2),
    "a config of no experts": (edit("config.json", put("num_experts", 0)), 2),
    "a config whose hidden size is a text": (edit("config.json", put("hidden_size", "64")), 2),
    "a config whose hidden size is true": (edit("config.json", put("hidden_size", True)), 2),
    "a config with more experts per token than experts": (
        edit("config.json", put("num_experts_per_tok", 9)),
        2,
    ),
    "a config with one expert more than the weights": (edit("config.json", put("num_experts", 4)), 4),
    "a config with one layer less than the weights": (edit("config.json", put("num_hidden_layers", 1)), 2),
    "a config with another hidden size than the weights": (edit("config.json", put("hidden_size", 32)), 4),
    "a config of an unknown family": (edit("config.json", put("model_type", "unheard_of")), 2),
    "mlp_only_layers is a number": (edit("config.json", put("mlp_only_layers", 7)), 2),
    "the index is no JSON": (content(INDEX, b"{"), 2),
    "the index has no weight_map": (content(INDEX, b"{}"), 2),
    "the index maps to numbers": (edit(INDEX, put("weight_map", NORM, 3)), 2),
    "the index leads out by dots": (edit(INDEX, put("weight_map", NORM, "../x.safetensors")), 2),
    "the index leads out by an absolute path": (
        edit(INDEX, put("weight_map", NORM, "/etc/x.safetensors")),
        2,
    ),
    "the index names a pickle": (edit(INDEX, put("weight_map", NORM, "pytorch_model.bin")), 2),
    "the index names a shard that is missing": (lambda d: (d / SECOND).unlink(), 4),
    "the index names a file with a NUL": (edit(INDEX, put("weight_map", NORM, "a\0.safetensors")), 2),
    "a shard links to a file outside": (link(SECOND, "/etc/hostname"), 2),
    "a shard is empty": (content(SECOND, b""), 4),
    "a shard ends in its header's length": (cut(SECOND, 5), 4),
    "a shard ends in its header": (cut(SECOND, 100), 4),
    "a shard ends one byte early": (cut(SECOND, -1), 4),
    "a shard has a byte too many": (lambda d: content(SECOND, (d / SECOND).read_bytes() + b"\0")(d), 4),
    "a header of 2^63 bytes": (patch(SECOND, 0, (2**63).to_bytes(8, "little")), 4),
    "a header of 0 bytes": (patch(SECOND, 0, bytes(8)), 4),
    "a header that is no JSON": (patch(SECOND, 8, b"}"), 4),
    "a tensor that overlaps another": (header(SECOND, put(NORM, "data_offsets", [0, 128])), 4),
    "a tensor past the end": (header(SECOND, put(NORM, "data_offsets", [2**40, 2**40 + 128])), 4),
    "a tensor whose shape overflows": (header(SECOND, put(NORM, "shape", [2**62, 2**62])), 4),
    "a tensor with a negative dimension": (header(SECOND, put(NORM, "shape", [-64])), 4),
    "a tensor of an unknown type": (header(SECOND, put(NORM, "dtype", "Q9")), 4),
    "a weight that is NaN": (patch(SECOND, -2, b"\xc0\x7f"), 4),
    "a weight that is infinite": (patch(FIRST, -2, b"\x80\x7f"), 4),
}
"""Fault -> (change that causes it, exit code of convert)."""

LAYER, DENSE = "experts-00001.safetensors", "dense.safetensors"
STORES: dict[str, tuple[Break, int]] = {
    "store.json is empty": (content("store.json", b""), 4),
    "store.json is torn": (cut("store.json", -20), 4),
    "store.json nests a hundred thousand lists": (content("store.json", b"[" * 100_000), 4),
    "store.json is of a newer format": (edit("store.json", put("format", 99)), 4),
    "store.json has a layer file outside": (edit("store.json", put("layers", "1", "file", "../x")), 4),
    "store.json has an offset of 2^62": (edit("store.json", put("layers", "1", "records", 0, 0, 2**62)), 4),
    "store.json has a group of 48": (edit("store.json", put("matrices", 0, "group", 48)), 4),
    "store.json is gone": (lambda d: (d / "store.json").unlink(), 2),
    "a layer's file is gone": (lambda d: (d / LAYER).unlink(), 4),
    "a layer's file is empty": (content(LAYER, b""), 4),
    "a layer's file ends one byte early": (cut(LAYER, -1), 4),
    "a bit of a layer's last plane is flipped": (patch(LAYER, -1, b"\x55"), 4),
    "a layer's header claims 2^63 bytes": (patch(LAYER, 0, (2**63).to_bytes(8, "little")), 4),
    "a layer's file is another layer's": (
        lambda d: shutil.copyfile(d / "experts-00000.safetensors", d / LAYER),
        4,
    ),
    "the dense weights are gone": (lambda d: (d / DENSE).unlink(), 4),
    "the dense weights end early": (cut(DENSE, -1), 4),
    "a bit of the dense weights is flipped": (patch(DENSE, -1, b"\x55"), 4),
    "the config was edited": (edit("config.json", put("rope_theta", 1)), 4),
    "the tokenizer is gone": (lambda d: (d / "tokenizer.json").unlink(), 4),
}
"""Fault -> (change that causes it, exit code of verify)."""


if __name__ == "__main__":
    for number, (what, (damage, _)) in enumerate(CHECKPOINTS.items()):
        damage(small_checkpoint.save(Path(sys.argv[1]) / str(number)))
        print(f"{number:>3}  {what}")
