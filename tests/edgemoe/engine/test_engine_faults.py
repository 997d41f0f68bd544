"""Errors under a running engine: named, and without a change of sequences and tiers."""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from counted_engine import CountedEngine
from integrity import check_integrity
from safetensors.torch import load_file, save_file
from small_store import flip

from edgemoe.cache.lfru import LFRU
from edgemoe.chat.ctrl_c import CtrlC
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import (
    ChecksumMismatch,
    ContextExceeded,
    DoesNotFit,
    MissingTensor,
    ModelRefused,
    NotFinite,
    TruncatedFile,
)
from edgemoe.kernels.registry import compute
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import Plane
from edgemoe.storage.sizes import format_least
from edgemoe.storage.store.manifest import Manifest

PROMPT = [5, 9, 17, 33, 65, 129]
LAST_LAYER = 2


def one(sequence: SequenceKV, *tokens: int) -> Step:
    return Step((Segment(sequence, tokens),))


def started(engine: Engine) -> tuple[SequenceKV, torch.Tensor]:
    """A sequence with the prompt, and a copy of its keys and values."""
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    return sequence, valid(sequence)


def valid(sequence: SequenceKV) -> torch.Tensor:
    """A copy of the valid keys and values."""
    return torch.stack([part[:, :, : sequence.length] for part in (sequence.keys, sequence.values)]).clone()


def assert_unharmed(engine: Engine, sequence: SequenceKV, before: torch.Tensor) -> None:
    """The sequence has not changed, and no block of a tier is lost or still in use."""
    assert sequence.length == len(PROMPT)
    assert torch.equal(valid(sequence), before)
    for tier in (engine.vram, engine.dram):
        if tier is not None:
            check_integrity(tier)


@pytest.fixture
def want(open_engine, tiny_store) -> torch.Tensor:
    """The logits of token 42 after the prompt, undisturbed."""
    engine = open_engine(tiny_store)
    return engine.step(one(started(engine)[0], 42))


@pytest.mark.e2e
@pytest.mark.parametrize("dram_experts", [0, 3])
def test_a_truncated_file_fails_the_step(open_engine, damageable, want, dram_experts):
    """The step fails with exit code 4 and changes nothing; it succeeds once the file is whole again."""
    engine = open_engine(damageable, experts=2, dram_experts=dram_experts)
    sequence, before = started(engine)
    path = damageable / Manifest.load(damageable).layers[LAST_LAYER].file
    whole = path.read_bytes()
    engine.forget_experts()
    os.truncate(path, 4096)
    with pytest.raises(TruncatedFile, match=f"layer {LAST_LAYER}") as caught:
        engine.step(one(sequence, 42))
    assert caught.value.exit_code == 4
    assert str(path) in str(caught.value)
    assert_unharmed(engine, sequence, before)
    with path.open("r+b") as file:
        file.write(whole)
    assert torch.equal(engine.step(one(sequence, 42)), want)


@pytest.mark.e2e
@pytest.mark.parametrize("plane", list(Plane))
def test_a_flipped_bit_names_its_plane(open_engine, tiny_store, damageable, plane: Plane):
    """The step that needs the expert fails with its layer, expert and plane, and changes nothing."""
    scout = open_engine(tiny_store)
    sequence = started(scout)[0]
    scout.forget_experts()
    scout.step(one(sequence, 42))
    key = max(scout.vram.resident())
    assert key.layer == LAST_LAYER

    engine = open_engine(damageable, experts=2)
    sequence, before = started(engine)
    engine.forget_experts()
    manifest = Manifest.load(damageable)
    records = manifest.layers[key.layer]
    offset = records.records[key.expert].offset + manifest.geometry.planes[plane].offset
    flip(damageable / records.file, offset + 5)
    with pytest.raises(ChecksumMismatch) as caught:
        engine.step(one(sequence, 42))
    where = f"plane {plane.label} of layer {key.layer}, expert {key.expert},"
    assert where in str(caught.value)
    assert f"offset {offset}" in str(caught.value)
    assert_unharmed(engine, sequence, before)


def test_a_prompt_longer_than_the_context_is_not_run(open_engine, tiny_store):
    """Both counts are in the message, no expert is requested, and the sequence stays usable."""
    engine = open_engine(tiny_store, context=10)
    sequence, before = started(engine)
    engine.take_counts()
    with pytest.raises(ContextExceeded, match=r"11 tokens.*one of 10"):
        engine.prefill(sequence, [3] * 5)
    with pytest.raises(ContextExceeded, match=r"11 tokens.*one of 10"):
        engine.step(one(sequence, 3, 3, 3, 3, 3))
    assert engine.take_counts().requests == 0
    assert_unharmed(engine, sequence, before)
    engine.prefill(sequence, [3] * 4)
    assert sequence.length == 10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_names_its_layer(open_engine, tiny_store, want, value):
    """NaN or infinity from a layer's weights is reported with that layer, and the token is not appended."""
    engine = open_engine(tiny_store)
    sequence, before = started(engine)
    ends = re.compile(r"model\.layers\.1\.module\.self_attn\.(.*\.)?(o_proj|out)\.weight")
    (weight,) = (w.data for name, w in engine.model.named_parameters() if ends.fullmatch(name))
    whole = weight.clone()
    weight.fill_(value)
    with pytest.raises(NotFinite, match="layer 1's output"):
        engine.step(one(sequence, 42))
    assert_unharmed(engine, sequence, before)
    weight.copy_(whole)
    assert torch.equal(engine.step(one(sequence, 42)), want)


def rewrite(store: Path, change) -> None:
    path = store / "dense.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_a_missing_dense_tensor_is_named(open_engine, damageable, name: str):
    """A store without a tensor that its config needs is refused with the tensor's name."""
    rewrite(damageable, lambda tensors: tensors.pop(name))
    with pytest.raises(MissingTensor, match=name):
        open_engine(damageable)


def test_a_dense_tensor_of_another_shape_is_missing(open_engine, damageable):
    """A tensor of the right name and another shape is refused."""
    rewrite(damageable, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63).bfloat16()}))
    with pytest.raises(MissingTensor, match=r"model\.norm\.weight"):
        open_engine(damageable)


def test_a_dense_tensor_without_a_place_is_refused(open_engine, damageable):
    """A tensor without a module shows that config and weights do not belong together."""
    name = "model.layers.1.self_attn.q_proj.more"
    rewrite(damageable, lambda tensors: tensors.update({name: torch.zeros(64).bfloat16()}))
    with pytest.raises(ModelRefused, match=name):
        open_engine(damageable)


@pytest.mark.parametrize("level", [8, 2])
def test_the_smallest_limit_is_the_smallest(tiny_store, want, level):
    """One byte below the minimum is refused with that minimum, exit 3; at it, a prompt is answered."""
    store = StoreModel.open(tiny_store)
    settings = RunSettings.uniform(level)
    least = store.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
    with pytest.raises(DoesNotFit, match=f"--vram-limit {format_least(least)} ") as caught:
        store.plan(vram_limit=least - 1, settings=settings, context=64)
    assert (caught.value.exit_code, caught.value.minimum) == (3, least)
    with CountedEngine(
        store, store.plan(vram_limit=least, settings=settings, context=64), settings
    ) as engine:
        got = engine.step(one(started(engine)[0], 42))
        assert engine.budget.used_bytes <= least
    assert torch.equal(got, want) == (level == 8)


@pytest.mark.e2e
@pytest.mark.parametrize("experts", [2, 5])
def test_ctrl_c_in_the_middle_of_a_step(open_engine, tiny_store, monkeypatch, want, experts):
    """SIGINT while an expert is computed ends the step without a change, and the step can be repeated."""
    engine = open_engine(tiny_store, experts=experts, dram_experts=3)
    sequence, before = started(engine)
    engine.forget_experts()  # so that every layer's experts are computed by the kernel's forward
    forward, computed = compute().kernel.forward, []

    def interrupted(*args):
        computed.append(1)
        if len(computed) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(compute().kernel, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(one(sequence, 42))
    assert len(computed) == 2
    assert_unharmed(engine, sequence, before)
    assert torch.equal(engine.step(one(sequence, 42)), want)


@pytest.mark.e2e
@pytest.mark.parametrize("guard", [nullcontext, lambda: CtrlC(as_key=True)], ids=["python", "chat"])
@pytest.mark.parametrize(("method", "experts"), [("used", 8), ("arrived", 2), ("forgotten", 2)])
def test_ctrl_c_within_a_change_of_a_tier(open_engine, tiny_store, monkeypatch, want, guard, method, experts):
    """SIGINT between the two halves of a change, under Python's handler and a chat's, leaves the tier whole."""
    engine = open_engine(tiny_store, experts=experts)
    sequence, before = started(engine)
    change, calls = getattr(LFRU, method), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return change(*args)

    with monkeypatch.context() as patch:
        patch.setattr(LFRU, method, interrupted)
        with pytest.raises(KeyboardInterrupt), guard() as chat, chat.answering() if chat else nullcontext():
            engine.step(one(sequence, 42))
    assert_unharmed(engine, sequence, before)
    assert torch.equal(engine.step(one(sequence, 42)), want)


def test_an_engine_that_cannot_be_built_leaves_no_thread_and_no_open_store(
    damageable, open_engine, monkeypatch
):
    """An error while loading stops the readers and closes the shards before it is raised."""

    def fail(*_: object) -> None:
        raise RuntimeError("loading went wrong")

    def threads_and_files() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    monkeypatch.setattr("edgemoe.engine.load_model.build_model", fail)
    before = threads_and_files()
    with pytest.raises(RuntimeError, match="loading went wrong"):
        open_engine(damageable)
    assert threads_and_files() == before
