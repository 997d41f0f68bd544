"""Calls of every function of the compiled kernel, on small random inputs, for tests that compare two builds of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from aarch64 import POOL, Call, Structures

from edgemoe.kernels.native import structures as c
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.store import dense_groups, dense_shapes

SHAPES = [(64, 64, 64), (96, 128, 32), (80, 100, 64), (64, 576, 64)]
"""Rows, columns and group of an expert's first matrix: a block, a short chunk, a last block of 16 rows with padded
columns, and more chunks than a strip of tiles has."""

ROWS = (1, 3, 13, 33)
"""Numbers of rows, one of every bucket of csrc/paths.h."""

BAD = (0x7FC0, 0x7F80, 0xFF80)
"""bf16's NaN and infinities."""

TINY = 0x0208
"""1e-37 in bf16, whose inverse times 127 is no number."""

_generator = np.random.default_rng(20261125)


def bf16(*shape: int, scale: float = 1, outliers: bool = True) -> np.ndarray:
    """Normal numbers, of which some are 100 times as large, rounded down to bf16."""
    x = _generator.normal(size=shape) * scale
    if outliers:
        x *= np.where(_generator.random(shape) < 0.02, 100, 1)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def integers(low: int, high: int, *shape: int, dtype: Any = np.uint8) -> np.ndarray:
    """Uniform integers from low to high - 1."""
    return _generator.integers(low, high, shape, dtype=dtype)


def scales(*shape: int) -> np.ndarray:
    """bf16 scales of about 0.01."""
    return integers(0x3C00, 0x3CFF, *shape, dtype=np.uint16)


def quantized(x: np.ndarray, group: int) -> np.ndarray:
    """Any scales, sums and numbers as edgemoe_quantize_rows writes them, uint8."""
    of_chunks = _generator.random(2 * x.size // min(group, 64), np.float32)
    return np.concatenate(
        [of_chunks.view(np.uint8), integers(-127, 128, x.size, dtype=np.int8).view(np.uint8)]
    )


class Model:
    """The matrices of experts of a shape, and the planes of two experts."""

    def __init__(self, rows: int, cols: int, group: int) -> None:
        specs = MatrixSpec.of("gate_up", rows, cols, group), MatrixSpec.of("down", cols, rows // 2, 32)
        self.geometry = RecordGeometry(specs, 8)
        self.specs = [spec for spec, _, _ in self.geometry.matrix_offsets()]
        self.matrices = [
            Structures(
                c.Matrix,
                {
                    "rows": spec.padded_rows,
                    "cols": spec.padded_cols,
                    "group": spec.group,
                    "parameters_at": at,
                    "codes_at": codes // 2,
                    "half": self.geometry.codes_bytes // 2,
                    "parameter_bytes": self.geometry.parameter_bytes,
                    "limit": spec.limit,
                    "low_at": low // 2,
                    "low_half": self.geometry.low_bytes // 2,
                },
            )
            for (spec, at, codes), low in zip(
                self.geometry.matrix_offsets(), self.geometry.low_offsets(), strict=True
            )
        ]
        self.planes = [self._planes() for _ in range(2)]

    def _planes(self) -> dict[str, np.ndarray]:
        half, parameters = self.geometry.codes_bytes // 2, self.geometry.parameter_bytes // 2
        pairs = scales(parameters)
        pairs[1::2] = bf16(len(pairs[1::2]), scale=0.01)
        planes = {
            name: integers(0, 256, size) for name, size in (("base", half), ("d4", half), ("d8", 2 * half))
        }
        return {"parameters": pairs, **planes}

    def experts(self, level: int, rows: int, compensators: tuple[Structures, ...] = ()) -> Structures:
        """Both experts with `rows` rows each; of the first one some with factors."""
        fields: list[dict[str, Any]] = []
        for i, planes in enumerate(self.planes):
            at = i * rows
            fields.append({**planes, "level": level, "x": at, "y": at, "tokens": rows})
            if i < len(compensators):
                fields[i] |= {"compensator": compensators[i], "compensated": (rows + 1) // 2}
        return Structures(c.Expert, *fields)


def _factors(rank: int, rows: int, cols: int) -> dict[str, Any]:
    """Fields of `factors`."""
    fields: dict[str, Any] = {"rank": rank, "rows": rows, "cols": cols}
    for name, size in (("v", cols), ("u", rows)):
        groups = rank * -(-size // 64)
        fields |= {f"{name}.codes": integers(0, 256, groups * 24 + 4), f"{name}.scales": scales(groups)}
    return fields


def expert_calls() -> Iterator[Call]:
    """Quantization, products and whole experts at every level, for every shape and number of rows; with NaN."""
    for shape in SHAPES:
        model = Model(*shape)
        up, down = model.specs
        for level in (8, 4, 2):
            for rows in ROWS if shape == SHAPES[0] else (1, 3, 33):
                experts = model.experts(level, rows)
                x = bf16(2 * rows, up.padded_cols, scale=10)
                if rows == 13:
                    x[:3, 5] = BAD
                    x[4] = 0
                sizes = (POOL, model.matrices[0], x, *x.shape)
                yield Call("quantize_rows", (*sizes, np.zeros(quantized(x, up.group).nbytes, np.uint8)))
                row_of = integers(0, 2 * rows, 2 * rows, dtype=np.int64)
                for of in ((None, None), (row_of, None), (row_of, quantized(x, up.group))):
                    y, out = (np.zeros((2 * rows, spec.padded_rows), np.uint16) for spec in (up, down))
                    common = experts, 2, x, *x.shape, *of
                    yield Call("expert_product", (POOL, model.matrices[0], 0, *common, y, *y.shape))
                    for activation in (None, clamped_gate(down), *([wide_gate()] if level == 4 else [])):
                        arguments = (POOL, *model.matrices, down.cols, *common, activation)
                        yield Call("experts", (*arguments, out, *out.shape))


def factor_calls() -> Iterator[Call]:
    """Experts with low-rank factors, for one row and several, ranks that FACTOR_RANKS does not divide, and 0."""
    model = Model(96, 128, 32)
    up, down = model.specs
    inner = down.cols
    shapes = (6, inner, up.cols), (0, inner, up.cols), (4, down.rows, inner)
    fields = {f"of#{i}.{name}": value for i, of in enumerate(shapes) for name, value in _factors(*of).items()}
    for rows in (1, 3, 33):
        experts = model.experts(4, rows, (Structures(c.Compensator, fields),))
        x = bf16(2 * rows, up.padded_cols, scale=10)
        if rows == 3:
            x[0, 0] = BAD[0]
        arguments = (POOL, *model.matrices, inner, experts, 2, x, *x.shape)
        for of in (None, integers(0, 2 * rows, 2 * rows, dtype=np.int64)):
            out = np.zeros((2 * rows, down.padded_rows), np.uint16)
            yield Call("experts", (*arguments, of, None, None, out, *out.shape))


def clamped_gate(down: MatrixSpec) -> Structures:
    """An activation of two tables, and biases, of experts whose second matrix is given."""
    tables = bf16(1 << 16), bf16(1 << 16)
    biases = {"up_bias": bf16(2, 2 * down.cols), "down_bias": bf16(2, down.padded_rows)}
    return Structures(c.ExpertActivation, {"gate": tables[0], "up": tables[1], "interleaved": 1} | biases)


def wide_gate() -> Structures:
    """An activation whose gate is not rounded before its product with up."""
    gate = _generator.normal(size=1 << 16).astype(np.float32)
    return Structures(c.ExpertActivation, {"gate": gate, "up": bf16(1 << 16), "wide_gate": 1})


def dense_weight(weight: Any, scale: Any, rows: int, cols: int, bits: int) -> Structures:
    """A dense weight of 16, 8, 6, 5 or 4 bits."""
    scaled = {} if scale is None else {"row_scale": scale}
    return Structures(c.DenseWeight, {"weight": weight, "rows": rows, "cols": cols, "bits": bits} | scaled)


def dense_calls() -> Iterator[Call]:
    """Products with int8 and bf16 weights, for columns that vectors divide and others, also with NaN; and in groups."""
    grouped = torch.randn(96, 320, generator=torch.Generator().manual_seed(4))
    for bits in dense_shapes.BITS:
        codes = dense_groups.quantize_groups(grouped, bits).numpy()
        for tokens in (1, 3, 33):
            y, x = np.zeros((tokens, 96), np.uint16), bf16(tokens, 320, scale=10)
            yield Call("dense_product", (POOL, dense_weight(codes, None, 96, 320, bits), x, *x.shape, y, 96))
    for rows, cols in ((64, 256), (33, 304), (5, 100), (64, 17), (70, 576)):
        for tokens in (1, 3, 13, 33):
            x = bf16(tokens, cols, scale=10)
            if tokens == 13:
                x[:3, 7] = BAD
                x[3], x[4] = 0, TINY
            weights = (
                dense_weight(integers(-127, 128, rows, cols, dtype=np.int8), scales(rows), rows, cols, 8),
                dense_weight(bf16(rows, cols), None, rows, cols, 16),
            )
            for weight in weights:
                y = np.zeros((tokens, rows), np.uint16)
                yield Call("dense_product", (POOL, weight, x, *x.shape, y, rows))
            wide = _generator.normal(size=(rows + tokens, cols)).astype(np.float32)
            out = np.zeros((tokens, rows), np.float32)
            yield Call("wide_product", (POOL, wide[:rows], rows, cols, wide[rows:].copy(), tokens, out))
            for number, weight in enumerate((bf16(rows, cols), wide[:rows])):
                out = np.zeros((tokens, rows), np.float32)
                yield Call("precise_product", (POOL, weight, number, rows, cols, x, tokens, out))
    for tokens in (1, 3, 70):
        stride, x = 40 * 33, bf16(3, tokens, 33)
        sizes = {"heads": 3, "stride": stride, "rows": 20, "cols": 33, "scale_stride": 40}
        sizes |= {"x_stride": tokens * 33, "y_stride": tokens * 20, "x_cols": 33, "y_cols": 20}
        codes = integers(-127, 128, 3, stride, dtype=np.int8)
        for fields in (
            {"weight": bf16(3, stride)},
            *({"weight": codes, "scale": scales(3, 40), "by_column": i} for i in (0, 1)),
        ):
            y = np.zeros((3, tokens, 20), np.uint16)
            yield Call("dense_heads", (POOL, Structures(c.DenseHeads, sizes | fields), x, tokens, y))


DELTA_SIZES = {"key_heads": 2, "heads": 4, "key_dim": 24, "value_dim": 40, "taps": 4}
DELTA_CHANNELS, DELTA_WRITES = 2 * 2 * 24 + 4 * 40, 4 * 40
DELTA_READS = DELTA_CHANNELS + DELTA_WRITES + 2 * 4


def delta_net(rounded: int, decays: int = 1) -> Structures:
    """A gated delta net, whose functions are any; with several decays of a head one of another form."""
    arrays = {
        "conv": (4, DELTA_CHANNELS),
        "added": (4 * decays,),
        "factor": (4,),
        "norm": (40,),
        "wide_gate": (1 << 16,),
    }
    floats = {name: _generator.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}
    floats["factor"] = -np.abs(floats["factor"])
    tables = {name: bf16(1 << 16, outliers=False) for name in ("silu", "sigmoid")}
    return Structures(
        c.DeltaNet, DELTA_SIZES | floats | tables | {"epsilon": 1e-6, "rounded": rounded, "decays": 1}
    )


def delta_state() -> tuple[np.ndarray, np.ndarray]:
    """The inputs of the convolution and the recurrence of one sequence."""
    return bf16(DELTA_CHANNELS, 4), _generator.normal(size=(4, 24, 40)).astype(np.float32)


def guessed(run: int, tokens: int, size: int) -> dict[str, object]:
    """The rows of the run of this number: where it has several tokens, all but two are guesses, after three others."""
    rows = {"first": run * tokens, "tokens": tokens}
    if not 2 < tokens < 16:
        return rows
    kept, earlier = np.zeros((tokens - 2, size), np.uint16), bf16(3, size, outliers=False)
    return rows | {"guesses": tokens - 2, "kept": kept, "earlier": earlier, "earlier_count": 3}


def delta_net_calls() -> Iterator[Call]:
    """One token of three sequences, more tokens of one than a chunk has, and guesses; a sequence without a token."""
    for count, tokens, decays in ((3, 1, 1), (1, 19, 1), (3, 1, 24), (2, 5, 24)):
        runs = []
        for run in range(count):
            (conv, state), (after, next_state) = delta_state(), delta_state()
            before = {} if run == 1 else {"conv": conv, "state": state}
            rows = guessed(run, tokens, DELTA_READS + 4 * (decays - 1))
            runs.append(before | rows | {"next_conv": after, "next_state": next_state})
        x = bf16(count * tokens, DELTA_READS + 4 * (decays - 1), outliers=False)
        out = np.zeros((count * tokens, DELTA_WRITES), np.uint16)
        net = delta_net(count % 2, decays)
        yield Call("delta_net", (POOL, net, x, count, Structures(c.DeltaRun, *runs), out))


def short_conv_calls() -> Iterator[Call]:
    """One token of three sequences, and several of one without a token, for channels that tasks do not divide."""
    for count, tokens, taps, bias in ((3, 1, 3, None), (1, 5, 4, np.linspace(-1, 1, 150, dtype=np.float32))):
        fields = {"channels": 150, "taps": taps, "bias": bias}
        fields["conv"] = _generator.normal(size=(taps, 150)).astype(np.float32)
        before = [{"conv": bf16(150, taps)} if count > 1 else {} for _ in range(count)]
        before = [each | guessed(i, tokens, 450) for i, each in enumerate(before)]
        runs = Structures(c.DeltaRun, *(each | {"next_conv": bf16(150, taps)} for each in before))
        x, out = bf16(count * tokens, 450, outliers=False), np.zeros((count * tokens, 150), np.uint16)
        conv = Structures(c.ShortConv, {name: each for name, each in fields.items() if each is not None})
        yield Call("short_conv", (POOL, conv, x, count, runs, out))


SPACE_SIZES = {"groups": 2, "heads": 6, "key_dim": 10, "value_dim": 20}
SPACE_CHANNELS, SPACE_VALUES = 6 * 20 + 2 * 2 * 10, 6 * 20


def state_space_calls() -> Iterator[Call]:
    """One token of three sequences, and more tokens of one than a chunk has; a sequence without a token."""
    floats = {
        "factor": 6,
        "skip": 6,
        "norm": SPACE_VALUES,
        "wide_silu": 1 << 16,
        "conv.weights": 4 * SPACE_CHANNELS,
    }
    for count, tokens in ((3, 1), (1, 19), (2, 6)):
        fields = {name: _generator.normal(size=size).astype(np.float32) for name, size in floats.items()}
        fields |= {"factor": -np.abs(fields["factor"]), "added": bf16(6, outliers=False), "norm_size": 60}
        fields |= {"softplus": bf16(1 << 16, outliers=False), "least": 0.0, "most": 2.0, "epsilon": 1e-6}
        fields |= {
            "conv.taps": 4,
            "conv.channels": SPACE_CHANNELS,
            "conv.silu": bf16(1 << 16, outliers=False),
        }
        fields["conv.bias"] = np.linspace(-1, 1, SPACE_CHANNELS, dtype=np.float32)
        runs = []
        for run in range(count):
            states = [_generator.normal(size=(6, 10, 20)).astype(np.float32) for _ in range(2)]
            before = {} if run == 1 else {"conv": bf16(SPACE_CHANNELS, 4), "state": states[0]}
            before |= guessed(run, tokens, SPACE_VALUES + SPACE_CHANNELS + 6)
            runs.append(before | {"next_conv": bf16(SPACE_CHANNELS, 4), "next_state": states[1]})
        x = bf16(count * tokens, SPACE_VALUES + SPACE_CHANNELS + 6, outliers=False)
        space, out = (
            Structures(c.StateSpace, SPACE_SIZES | fields),
            np.zeros((count * tokens, SPACE_VALUES), np.uint16),
        )
        yield Call("state_space", (POOL, space, x, count, Structures(c.DeltaRun, *runs), out))


def row_calls() -> Iterator[Call]:
    """Norms, sums of rows, weighted sums, embeddings and the head, for columns that vectors divide and others."""
    for cols in (64, 300, 17):
        x, weight = bf16(20, cols), bf16(cols)
        x[1], x[2, :3] = 0, BAD
        for name, pool in (("rms_norm", ()), ("norm_rows", (POOL,))):
            for wide in (0, 1):
                by = weight.astype(np.float32) / 3e4 if wide else weight
                yield Call(name, (*pool, x, by, wide, 1e-6, *x.shape, np.zeros_like(x)))
        tokens, weights = integers(0, 6, 20, dtype=np.int64), _generator.normal(size=20).astype(np.float32)
        yield Call("add_rows", (POOL, x, tokens, weights, *x.shape, np.ones((6, cols), np.float32)))
        row_of = integers(-1, 20, 5, 4, dtype=np.int64)
        for add in (0, 1):
            yield Call("weighted_sum", (x, row_of, weights, 5, 4, cols, add, bf16(5, cols)))
        table, row_scale = integers(-127, 128, 40, cols, dtype=np.int8), scales(40)
        fields = {
            "table": table,
            "row_scale": row_scale,
            "rows": 40,
            "bits": 8,
            "norm": weight,
            "epsilon": 1e-6,
        }
        weight_of = {"weight": table, "row_scale": row_scale, "rows": 40, "cols": cols, "bits": 8}
        head = {"head.bias": bf16(40)} | {f"head.weight.{name}": value for name, value in weight_of.items()}
        outer = Structures(c.OuterLayers, fields | head)
        yield Call("embed", (outer, 39, np.zeros(cols, np.uint16), cols))
        normed, logits = np.zeros_like(x), np.zeros((20, 40), np.uint16)
        yield Call("head", (POOL, outer, x, 20, normed, cols, logits, 40))
    yield from _grouped_outer_calls()


def _grouped_outer_calls() -> Iterator[Call]:
    """Embeddings and a head of fewer than 8 bits, which share their codes, and embeddings of bf16."""
    values = torch.randn(96, 128, generator=torch.Generator().manual_seed(5))
    tables = {bits: dense_groups.quantize_groups(values, bits).numpy() for bits in dense_shapes.BITS}
    for bits, table in (tables | {16: bf16(96, 128)}).items():
        head = {"weight": table, "rows": 96, "cols": 128, "bits": bits}
        fields = {"table": table, "rows": 96, "bits": bits, "norm": bf16(128), "epsilon": 1e-6}
        fields |= {f"head.weight.{name}": value for name, value in head.items()}
        outer, logits = Structures(c.OuterLayers, fields), np.zeros((3, 96), np.uint16)
        yield Call("embed", (outer, 39, np.zeros(128, np.uint16), 128))
        yield Call("head", (POOL, outer, bf16(3, 128), 3, np.zeros((3, 128), np.uint16), 128, logits, 96))


def router_calls() -> Iterator[Call]:
    """The router's top k of one token and of many, normalised or rounded or not; remapping, and levels of experts."""
    for tokens, normalise, rounded in ((1, 1, 1), (5, 0, 1), (40, 1, 0)):
        count, cols, k = 48, 96, 4
        fields = {"weight": bf16(count, cols, scale=0.1), "count": count, "cols": cols, "k": k}
        fields |= {"expert_scale": np.linspace(0.5, 2, count, dtype=np.float32)} if tokens == 40 else {}
        router = Structures(c.Router, fields | {"normalise": normalise, "rounded": rounded})
        x = bf16(tokens, cols)
        if tokens == 5:
            x[0, 0] = BAD[0]
        logits, probabilities = np.zeros((tokens, count), np.uint16), np.zeros(3 * count, np.float32)
        chosen, gates = np.zeros((tokens, k), np.int64), np.zeros((tokens, k), np.float32)
        own = {"state_norm": np.ones(cols, np.float32), "state_scale": bf16(cols), "state_factor": 0.3}
        normed = Structures(c.Router, fields | own | {"state_epsilon": 1e-6})
        yield Call("router_states", (POOL, normed, x, tokens, np.zeros_like(x)))
        arguments = (POOL, router, x, *x.shape, logits, probabilities, chosen, gates)
        yield Call("router_topk", arguments)
        logits = bf16(tokens, count)
        chosen = np.argsort(_generator.random((tokens, count)))[:, :k].astype(np.int64)
        popularity = np.zeros(count, np.int64)
        rule = Structures(c.RemappingRule, {"alpha": 2.0, "bins": 4, "popularity": popularity})
        counts = np.zeros(2, np.int64)
        arguments = (router, rule, logits, tokens, probabilities.copy(), chosen, gates.copy(), counts)
        yield Call("remap", arguments)
    kept = _generator.random(8).astype(np.float32)
    yield Call("renormalise", (np.ones(8, np.float32), 8, kept, 8))
    rule = Structures(
        c.LevelRule,
        {
            "rule": 2,
            "count": 3,
            "experts": 8,
            "damage": _generator.random((8, 3)).astype(np.float32),
            "price": _generator.random((1, 3)).astype(np.float32),
        },
    )
    gates, chosen = (
        np.sort(_generator.random(8).astype(np.float32))[::-1].copy(),
        np.arange(8, dtype=np.int64),
    )
    yield Call("levels", (rule, gates, chosen, 8, np.zeros(8, np.int64)))


def _attention(
    kind: int, dim: int, context: int, norms: bool, past: int, **more: Any
) -> tuple[Structures, dict[str, Any]]:
    """The shape of 6 heads over 2 of keys, and fields of a KV whose first `past` rows are random numbers'."""
    fields: dict[str, Any] = {"heads": 6, "kv_heads": 2, "dim": dim, "value_dim": dim, "scaling": dim**-0.5}
    fields |= more
    if norms:
        fields |= {"q_norm": bf16(dim), "q_norm_size": dim, "q_epsilon": 1e-6}
        fields |= {"k_norm": bf16(2 * dim), "k_norm_size": 2 * dim, "k_epsilon": 1e-5}
    kv: dict[str, Any] = {"context": context, "key_format": kind, "value_format": kind}
    for name in ("keys", "values"):
        rows = bf16(2, context, dim, scale=0.5, outliers=False)
        if kind:
            codes = integers(0, 256, 2, context, dim if kind == 1 else dim // 2)
            rows = np.concatenate((scales(2, context, -(-dim // 32)).view(np.uint8), codes), axis=2)
        rows[:, past:] = 0
        kv[name] = np.ascontiguousarray(rows)
    kv["rotation"] = (dim & -dim) if kind else 0
    return Structures(c.AttentionShape, fields), kv


def attention_calls() -> Iterator[Call]:
    """A new token's attention and a prompt's, in every format of keys and values, with windows, scores and a NaN.

    Some clip what is projected; others have sinks, and queries that are prepared.
    """
    for kind in range(3):
        for dim, past, norms, window in ((32, 40, True, 0), (48, 9, False, 5), (16, 0, True, 0)):
            shape, fields = _attention(kind, dim, 64, norms, past, clip=0.5 if dim == 48 else 0)
            if kind == 0 and past == 9:
                fields["keys"][1, 7, 3] = BAD[0]
            first = past + 1 - window if window else 0
            kv = Structures(c.AttentionKV, fields | {"past": past, "first": first})
            rotation = [bf16(1, dim, outliers=False) for _ in range(2)]
            qkv = bf16(1, 10 * dim, scale=0.5)
            yield Call("attention", (POOL, shape, kv, 1, qkv, *rotation, np.zeros((1, 6 * dim), np.uint16)))
    for kind, dim, past, rows, window in (
        (0, 32, 70, 50, 0),
        (1, 16, 3, 30, 10),
        (2, 48, 20, 24, 0),
        (0, 16, 5, 20, 9),
    ):
        shape, fields = _attention(kind, dim, 128, True, past)
        counted = window != 9
        if not counted:
            fields["keys"][0, 2, 3] = BAD[0]
        kv = Structures(c.AttentionKV, fields | {"past": past})
        qkv, rotation = bf16(rows, 10 * dim, scale=0.5), [bf16(rows, dim, outliers=False) for _ in range(2)]
        received = np.zeros(past + rows, np.float32) if counted else None
        # Rows 3 to 11 see each other in both directions.
        ahead = np.array([max(11 - row, 0) if row >= 3 else 0 for row in range(rows)], np.int32)
        out = np.zeros((rows, 6 * dim), np.uint16)
        arguments = (POOL, shape, kv, rows, window, ahead if window else None, qkv, *rotation, out)
        yield Call("attention_rows", (*arguments, rows // 2, received))
    for more, reads in (
        ({"value_dim": 20, "v_scale": 0.7, "clip": 0.5}, 6 * 32 + 2 * (32 + 20)),
        ({"values_are_keys": 1, "v_norm": bf16(32), "v_epsilon": 1e-6}, 8 * 32),
    ):
        for rows in (1, 30):
            shape, fields = _attention(0, 32, 64, True, 9, **more)
            kv, rotation = Structures(c.AttentionKV, fields | {"past": 9}), [bf16(rows, 32) for _ in range(2)]
            out = np.zeros((rows, 6 * more.get("value_dim", 32)), np.uint16)
            arguments = (POOL, shape, kv, rows, 0, None, bf16(rows, reads, scale=0.5), *rotation, out)
            yield Call("attention_rows", (*arguments, 0, None))
    sinks = _generator.normal(size=6).astype(np.float32)
    shape, fields = _attention(0, 32, 128, False, 90, sinks=sinks, prepared=1)
    for past, rows in ((89, 1), (60, 30)):
        kv = Structures(c.AttentionKV, fields | {"past": past})
        out = np.zeros((rows, 6 * 32), np.uint16)
        arguments = (POOL, shape, kv, rows, 0, None, bf16(rows, 6 * 32, scale=0.5), None, None, out)
        yield Call("attention_rows", (*arguments, 0, np.zeros(past + rows, np.float32)))


def latent_calls() -> Iterator[Call]:
    """Latent attention of rows in two blocks, in every pairing and format of keys."""
    heads, key, value, latent, rotary, past, rows = 3, 16, 12, 32, 16, 5, 20
    stored, both = latent + rotary, key + value
    shape = {"heads": heads, "kv_heads": 1, "scaling": 0.2, "prepared": 1}
    shape |= dict.fromkeys(("dim", "rotated", "value_dim"), stored)
    for pairing, (kind, row) in enumerate(((0, 2 * stored), (1, stored + 4), (2, stored // 2 + 4))):
        codes, of_rows = integers(-127, 128, heads, both, latent, dtype=np.int8), scales(heads, both)
        fields = {"heads": heads, "key": key, "value": value, "latent": latent, "rotary": rotary}
        fields |= {"keys": codes, "values": codes[:, key:].copy(), "stride": both * latent}
        fields["values"] = np.concatenate([fields["values"].ravel(), codes.ravel()])
        fields |= {"key_scale": of_rows, "value_scale": scales(heads, both), "scale_stride": both}
        fields |= {"norm": bf16(latent), "epsilon": 1e-6, "pairing": pairing}
        kv = {"keys": np.zeros((32, row), np.uint8), "values": np.zeros((32, row), np.uint8), "context": 32}
        kv |= {"past": past, "key_format": kind, "value_format": kind, "rotation": 16 if kind else 0}
        angles = _generator.random((2, rows, rotary)).astype(np.float32)
        tables = list(angles[..., : rotary // 2].copy()) if pairing == 2 else list(bf16(2, rows, rotary))
        run = {"rows": rows, "queries": bf16(rows, heads * (key + rotary)), "compressed": bf16(rows, stored)}
        run |= {"cosine": tables[0].copy(), "sine": tables[1].copy(), "block": 12}
        run |= {name: np.zeros((12, heads * stored), np.uint16) for name in ("as_keys", "summed")}
        run["out"] = np.zeros((rows, heads * value), np.uint16)
        of = (c.LatentAttention, fields), (c.AttentionShape, shape), (c.AttentionKV, kv), (c.LatentRows, run)
        yield Call("latent_rows", (POOL, *(Structures(kind, each) for kind, each in of)))


def column_calls() -> Iterator[Call]:
    """Codes of columns for three levels and for one, with rows that a strip does not divide."""
    for levels, unit, rest in (((2, 4, 8), 1, 0.0), ((2, 4), 16, 7.5), ((6,), 4, 1.5)):
        count, columns, rows = len(levels), 80, 40
        left = _generator.normal(size=(count, columns, rows)).astype(np.float32)
        upper = np.triu(_generator.normal(size=(columns, columns)) * 0.1 + np.eye(columns)).astype(np.float32)
        steps = (_generator.random((columns, rows)) * 0.02 + 0.005).astype(np.float32)
        sizes = columns, rows, 16, 80, np.array(levels), np.array([1, 4, 16], np.float32)
        out = np.zeros((columns, rows), np.uint8), np.zeros((count, 64, rows), np.float32)
        yield Call("code_columns", (rest, left, upper, steps, steps * 2, *sizes, count, unit, *out))


KERNEL_CALLS = (
    *(expert_calls, factor_calls, dense_calls, delta_net_calls, short_conv_calls),
    state_space_calls,
    *(row_calls, router_calls, attention_calls),
    latent_calls,
    column_calls,
)
"""All of the above."""
