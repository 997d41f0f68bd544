"""Sizes of the C structures of csrc/ that ctypes builds, compared with the compiled ones."""

from __future__ import annotations

import ctypes

from edgemoe.kernels.native.structures import (
    AttentionKV,
    AttentionShape,
    Buffer,
    Compensator,
    DecoderLayer,
    DeltaCopies,
    DeltaNet,
    DeltaRun,
    DenseHeads,
    DenseWeight,
    Expert,
    ExpertActivation,
    ExpertWorkspace,
    LatentAttention,
    LatentRows,
    LevelRule,
    Linear,
    Matrix,
    Operation,
    OuterLayers,
    RemappingRule,
    Rotation,
    Router,
    SequenceKV,
    ShortConv,
    StateSpace,
)

SIZES = (
    *(Matrix, Expert, Router, AttentionShape, AttentionKV),
    *(Linear, Buffer, Operation, Rotation, LevelRule, DecoderLayer),
    *(SequenceKV, ExpertWorkspace, OuterLayers, RemappingRule, Compensator),
    *(DeltaNet, DeltaRun, DeltaCopies, ExpertActivation, DenseHeads, LatentAttention, ShortConv),
    DenseWeight,
    *(StateSpace, LatentRows),
)
"""In the order of `edgemoe_sizes` in csrc/decode_layers.c."""


def check_sizes(library: ctypes.CDLL) -> None:
    """Compares every structure's size with the compiled one.

    Raises:
        AssertionError: they differ; the library was not built from these sources.
    """
    compiled = [*(ctypes.c_int64 * len(SIZES)).in_dll(library, "edgemoe_sizes")]
    differing = [
        f"{kind.__name__}: expected {size} bytes, got {ctypes.sizeof(kind)}"
        for kind, size in zip(SIZES, compiled, strict=True)
        if ctypes.sizeof(kind) != size
    ]
    assert not differing, differing
