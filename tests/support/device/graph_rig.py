"""Engines whose new tokens take captured launches, on a double that registers what these launches read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from counted_engine import CountedEngine
from device_double import DoubleDevice, poisoned
from engine_rig import limited, on_device
from family_models import random_model, save
from interpreter import few_programs, round_like_a_gpu
from recorded_launches import at_each_launch

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kernels.registry import kernels_for
from edgemoe.kernels.torch_planes import block_tensor
from edgemoe.kernels.triton import attention, dense
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kernels.triton.products import Tile
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.graph.groups import GraphGroups
from edgemoe.layers.router import CompiledRouter
from edgemoe.memory import tiers
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.settings import RunSettings


def graph_store(place: Path, family: str, *, bits: int = 16, **config) -> Path:
    """Converts a random model of a family."""
    model = random_model(family, **{"num_experts_per_tok": 3, "num_hidden_layers": 2} | config)
    save(model, place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=8, layout="auto", dense_bits=bits)
    return place / "store"


def graph_engines(store: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Yields a function that opens engines on a double by Triton's kernels, with blocks for so many experts in each
    tier (None: all). After the test the doubles assert that nothing was overwritten that a launch still read.
    """
    round_like_a_gpu(patch)
    few_programs(patch)
    for module, name, few in (
        (dense, "ROWS", 512),
        (dense, "COLS", 64),
        (attention.StoredRowAttention, "splits", 2),
    ):  # the interpreter's time goes by programs, and by the elements of a tile
        patch.setattr(module, name, few)
    patch.setattr(triton_experts, "VECTOR", Tile(rows=64))
    patch.setattr(tiers, "on_device", poisoned)
    for part in (
        GroupedQueryAttention,
        CompiledRouter,
        DenseNorm,
    ):  # the double's place is the CPU, which has kernels
        patch.setattr(part, "try_from", lambda *args: None)
    devices = []
    with ExitStack() as stack:

        def open_one(
            experts: int | None = None,
            dram_experts: int = 0,
            *,
            seed: int = 0,
            parallel: int = 1,
            haste: float = 0.2,
            kv: KVFormat | None = None,
            **settings,
        ) -> Engine:
            opened = StoreModel.open(store).with_kv(kv or KVFormat())
            device = DoubleDevice(seed, haste=haste)
            devices.append(device)
            compute = kernels_for("cuda")[0]
            form = compute.form(opened.manifest.geometry, opened.compute.layout, compute.layout)
            opened = on_device(replace(opened, form=form, compute=compute), device)
            chosen = RunSettings(**{"levels": (8,), "exact": True} | settings)
            plan = limited(opened, chosen, experts, dram_experts, parallel)
            engine = stack.enter_context(CountedEngine(opened, plan, chosen))
            if groups := getattr(engine.runner.fused, "_groups", None):
                register_reads(groups, device)
            return engine

        yield open_one
        for device in devices:
            device.end()


def register_reads(groups: GraphGroups, device: DoubleDevice) -> None:
    """Makes every launch of layers a kernel on the double that reads all blocks in the layers' tables."""
    launch, places = groups.launch, groups.places

    def registered(layers: range, saved) -> None:
        launch(layers, saved)
        at_each_launch(partial(read, layers))

    def read(layers: range) -> None:
        blocks = [*places._own.values(), *(blocks for _, blocks in places._slower.values())]
        tensors = [block_tensor(block) for each in blocks for block in each.values()]
        at = {tensor.data_ptr(): tensor for tensor in tensors}
        addresses = places.table[layers.start : layers.stop, :, :3].unique().tolist()
        device.launch({str(address): at[address] for address in addresses if address})

    groups.launch = registered


def logits(engine: Engine, tokens: tuple[int, ...] = (11, 250)) -> torch.Tensor:
    """Logits after each of some tokens that follow a prompt, [tokens, vocab]."""
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5])
    rows = [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens]
    engine.sequences.end(sequence)
    return torch.stack(rows)
