"""The root of the hashes by which keys and values are found again: it covers all that they depend on but tokens."""

from __future__ import annotations

import torch
import xxhash

import edgemoe
from edgemoe.engine.engine import Engine
from edgemoe.kernels.native.library import INTERFACE
from edgemoe.kv.rotary_lengths import RotaryLengths


class KeptRoots:
    """The roots of an engine's sequences, by its settings of now and the length of a prompt.

    Args:
        engine: the engine of the sequences.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._identity, self._lengths = _identity(engine), RotaryLengths.of(engine.store.config)
        self._compensators = xxhash.xxh3_128_hexdigest(repr(engine.store.manifest.compensators).encode())

    def of(self, tokens: int) -> bytes:
        """Returns the hash of no tokens: of all that their KV depends on, the model, its settings and the KV's form.

        Args:
            tokens: tokens of the prompt. The root is the same for all numbers of tokens with the same rotary factors.
        """
        engine, settings = self._engine, self._engine.settings
        damage = engine.rules.damage.digest if engine.rules.damage and settings.priced else None
        compensators = self._compensators if settings.compensation else None
        factors = self._lengths.factors(tokens) if self._lengths else 0
        length = (factors,) if factors else ()
        ranked = settings.levels_by, settings.remapping, settings.compensation, compensators, damage
        return xxhash.xxh3_128_digest(repr((self._identity, *ranked, *length)).encode())


def _identity(engine: Engine) -> tuple[object, ...]:
    """Everything but tokens and settings that KV depends on: store, KV format, program, kernels, processor or GPU.

    Equal in a later process where all of them are.
    """
    store, vectors = engine.store, torch.backends.cpu.get_cpu_capability()
    program = edgemoe.__version__, torch.__version__, store.compute.name, INTERFACE, vectors
    card: tuple[object, ...] = ()
    if store.device and store.device.place.type == "cuda":
        card = torch.cuda.get_device_name(store.device.place), torch.version.cuda
    return store.manifest.fingerprint, engine.shape.kv, program, *card
