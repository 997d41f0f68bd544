"""The types of tensors in a GGUF file of the quantization Q4_K_M, by llama.cpp's rules, for a plan without the file.

Files named UD-Q4_K_M differ in some layers; a test compares the sum with the size of each file that is planned so.
"""

from __future__ import annotations

from dataclasses import dataclass

MIXED = "Q4_K_M"


@dataclass(frozen=True)
class CodeType:
    """A type of codes.

    Args:
        name: its name in GGUF.
        bits_per_weight: bits of a weight, with its part of the scales.
        bits: bits of a code.
        group: weights that share a scale; None: codes that no record keeps.
    """

    name: str
    bits_per_weight: float
    bits: int = 4
    group: int | None = None


F32 = CodeType("F32", 32)
_LOW, _HIGH = CodeType("Q4_K", 4.5, 4, 32), CodeType("Q6_K", 6.5625)
_NARROW = {_LOW: CodeType("Q5_0", 5.5, 5, 32), _HIGH: CodeType("Q8_0", 8.5, 8, 32)}
"""Types that matrices have whose rows are no whole blocks of 256."""

_BLOCK = 256


def expert_type(layer: int, layers: int, columns: int, *, down: bool) -> CodeType:
    """The type of a matrix of experts: the second one, down, has more bits in half of the layers.

    >>> [expert_type(layer, 48, 768, down=True).name for layer in (0, 6, 8, 47)]
    ['Q6_K', 'Q4_K', 'Q6_K', 'Q6_K']

    Args:
        layer: number of the layer.
        layers: number of layers.
        columns: length of a row.
        down: whether it is the second matrix.
    """
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    kind = _HIGH if down and more else _LOW
    return kind if columns % _BLOCK == 0 else _NARROW[kind]


def dense_type(name: str, shape: tuple[int, ...]) -> CodeType:
    """The type of another tensor by transformers' name: the head has more bits, routers and vectors are floats."""
    if len(shape) < 2 or name.endswith((".gate.weight", ".router.weight")):
        return F32
    return _HIGH if name == "lm_head.weight" else _LOW
