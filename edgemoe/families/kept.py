"""Derived families, kept in memory and in the user's cache: deriving one imports transformers' code of its class."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache, lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgemoe.errors import EdgemoeError
from edgemoe.families.base import Family, Traits
from edgemoe.kv.shape import KVShape, LinearState
from edgemoe.machine.user_cache import user_cache
from edgemoe.storage.convert.config import Config
from edgemoe.storage.files.atomic import replacing, write_all

_MOST_FILES = 200
"""Most files of derived families, a few kilobytes each; the oldest go first."""

_CODE = ("base", "derive", "kept", "meta_model", "names", "recorded", "table")
"""Modules of this folder that decide what a file has."""


def kept_family(config: Config, traits: Traits) -> Family:
    """Returns the family of a config: derived once for each config, version of transformers and code of this folder.

    A file that cannot be read or written costs the time of deriving, and nothing else.

    Args:
        config: the config of a text model, bounded.
        traits: the declared properties of its model_type.

    Raises:
        ModelRefused: from families.derive.
    """
    values = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    return _kept(json.dumps(values, sort_keys=True, default=str), traits)


_WITHOUT_EFFECT = ("quantization_config", "architectures", "_name_or_path", "transformers_version")
"""Keys of a config that no size and no name depends on."""


@lru_cache(maxsize=64)
def _kept(values: str, traits: Traits) -> Family:
    name = sha256(f"{_code()} {version('transformers')} {values}".encode()).hexdigest()[:32]
    path = user_cache() / "families" / f"{name}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _read(_unsealed(path.read_bytes()), traits)
    from edgemoe.machine.model_code import without_advice, without_compiler

    with without_compiler(), without_advice():
        from edgemoe.families.derive import derive

        family = derive(json.loads(values), traits)
    with suppress(OSError, EdgemoeError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = _sealed(_written(family))
        with replacing(path, len(data)) as fd:
            write_all(fd, data)
        by_age = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in by_age[:-_MOST_FILES]:
            old.unlink(missing_ok=True)
    return family


@cache
def _code() -> str:
    """A hash of the code that derives families: files of other code are not read."""
    files = (Path(__file__).with_name(f"{name}.py") for name in _CODE)
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _sealed(values: dict[str, Any]) -> bytes:
    """JSON after a line with its hash."""
    raw = json.dumps(values).encode()
    return sha256(raw).hexdigest().encode() + b"\n" + raw


def _unsealed(data: bytes) -> dict[str, Any]:
    """The values of `_sealed`; raises ValueError where the hash is another one."""
    digest, _, raw = data.partition(b"\n")
    if digest.decode() != sha256(raw).hexdigest():
        raise ValueError("a damaged file")
    values: dict[str, Any] = json.loads(raw)
    return values


def _written(family: Family) -> dict[str, Any]:
    """A family as JSON, without what is declared of its model_type."""
    values = {each.name: getattr(family, each.name) for each in fields(family) if each.name != "traits"}
    return values | {"kv": asdict(family.kv), "dense": sorted(family.dense)}


def _read(values: dict[str, Any], traits: Traits) -> Family:
    """The family of `_written`."""
    kv, dense = _shape(values.pop("kv")), frozenset(values.pop("dense"))
    return Family(traits=traits, kv=kv, dense=dense, **_tuples(values))


def _shape(values: dict[str, Any]) -> KVShape:
    """The shape whose fields `_written` has taken apart; families have their KV as bf16."""
    linear, others = values.pop("linear"), tuple(map(_shape, values.pop("others")))
    index = values.pop("index")
    del values["format"]
    state = linear and LinearState(**_tuples(linear))
    return KVShape(**_tuples(values), linear=state, others=others, index=index and _shape(index))


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """The values with lists, also within lists, as tuples."""
    return {key: _tuple(value) for key, value in values.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
