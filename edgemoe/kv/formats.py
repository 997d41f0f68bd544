"""How keys and values are stored: bf16, or blocks of integer codes with a scale each (docs/decisions/0035).

A quantized row of D numbers is the bf16 scales of its blocks of 32, then the codes, padded to a multiple of 16: a byte
each (q8_0), or 16 in 8 bytes, number i of the 16 in the low half of byte i, number i + 8 in its high half (q4_0).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.errors import UserError

KINDS = ("bf16", "q8_0", "q4_0")
"""Names of formats, in the order of KV_BF16 and the others in csrc/attention/kv_rows.h."""

BLOCK = 32
"""Numbers that share a scale."""

TILE, TILE_QUERIES = 256, 64
"""Tokens whose keys and values are float32 at once where they are not multiplied as they lie, and the queries of each
head whose scores are; workspace.workspace_bytes counts both."""

GROUP = 16
"""Numbers whose 4-bit codes lie in 8 bytes."""


@dataclass(frozen=True)
class KVFormat:
    """How the keys and the values of a sequence are stored.

    >>> str(KVFormat("q8_0", "q8_0")), str(KVFormat("q8_0", "q4_0")), KVFormat().quantized
    ('q8_0', 'q8_0 keys, q4_0 values', False)

    Args:
        keys, values: one of KINDS.
        rotates: whether q4_0 keys are stored after a Hadamard rotation, which spreads large numbers over neighbours.

    Raises:
        UserError: another kind.
    """

    keys: str = "bf16"
    values: str = "bf16"
    rotates: bool = True

    def __post_init__(self) -> None:
        for option, kind in (("--kv-cache-k", self.keys), ("--kv-cache-v", self.values)):
            if kind not in KINDS:
                raise UserError(f"{', '.join(KINDS)} for {option}", repr(kind), "choose one of them")

    @property
    def quantized(self) -> bool:
        """Whether keys or values are stored as codes."""
        return (self.keys, self.values) != ("bf16", "bf16")

    def rotation(self, *sizes: int) -> int:
        """Numbers that are rotated together: the largest power of two that divides all sizes; 0: keys lie plain.

        >>> KVFormat("q4_0").rotation(128), KVFormat("q4_0").rotation(576, 512), KVFormat("q8_0").rotation(128)
        (128, 64, 0)

        Args:
            sizes: number of elements of a key, and of the part of it that is a value.
        """
        if self.keys != "q4_0" or not self.rotates:
            return 0
        return min(size & -size for size in sizes)  # the lowest bit of each

    @classmethod
    def of(
        cls, kv_cache: str | None = None, kv_cache_k: str | None = None, kv_cache_v: str | None = None
    ) -> KVFormat:
        """Returns the format of the options --kv-cache, --kv-cache-k and --kv-cache-v; None: not given.

        >>> str(KVFormat.of("q8_0", kv_cache_v="bf16")), str(KVFormat.of())
        ('q8_0 keys, bf16 values', 'bf16')

        Raises:
            UserError: no such kind, or --kv-cache together with both others, where it has no effect.
        """
        both = kv_cache
        if both is not None and both not in KINDS:
            raise UserError(f"{', '.join(KINDS)} for --kv-cache", repr(both), "choose one of them")
        if None not in (both, kv_cache_k, kv_cache_v):
            found = f"--kv-cache {both} as well"
            raise UserError("--kv-cache-k and --kv-cache-v alone", found, "leave --kv-cache out")
        return cls(kv_cache_k or both or KINDS[0], kv_cache_v or both or KINDS[0])

    def __str__(self) -> str:
        """The format's name in a plan."""
        plain = "" if self.rotates or self.keys != "q4_0" else ", not rotated"
        both = self.keys if self.keys == self.values else f"{self.keys} keys, {self.values} values"
        return both + plain


def row_bytes(kind: str, size: int) -> int:
    """Bytes of a stored row of `size` numbers.

    >>> row_bytes("bf16", 128), row_bytes("q8_0", 128), row_bytes("q4_0", 128), row_bytes("q4_0", 20)
    (256, 136, 72, 18)
    """
    if kind == "bf16":
        return 2 * size
    codes = -(-size // GROUP) * GROUP
    return 2 * -(-size // BLOCK) + (codes if kind == "q8_0" else codes // 2)
