"""Layers with a window keep their window alone: answers have the bits that they have with all tokens kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from counted_engine import CountedEngine
from device_double import DoubleDevice
from engine_rig import in_planes
from family_models import SMALL, VOCABULARY, random_model, save
from folder_models import folder_model, save_folder_model
from greedy import Greedy, assert_right, run
from integrity import check_kept
from present_pages import PAGEMAP, present_pages

from edgemoe.engine import kept_index, kept_sequences
from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.scheduler import Scheduler
from edgemoe.engine.sequences import Sequences
from edgemoe.errors import ModelRefused
from edgemoe.kv import blocks, window_rows, windows
from edgemoe.kv.block_files import path_of
from edgemoe.kv.blocks import BLOCK, chain, window_digest
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import PAGE, KVShape
from edgemoe.kv.step import Segment, Step
from edgemoe.kv.window_rows import MovedRows, most_rows
from edgemoe.kv.windows import Windows, most_tokens
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.graph.sequence_places import SequencePlaces
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.settings import RunSettings

CONTEXT = 3072
"""More tokens than a layer with a window of four keeps (most_tokens)."""

TOKENS = [(7 * i * i + i) % (VOCABULARY - 3) + 3 for i in range(2000)]


@pytest.fixture(scope="module")
def store_of(tmp_path_factory) -> Callable[[str], Path]:
    """Converts a small model of a family, once."""
    made = dict[str, Path]()

    def store(model_type: str) -> Path:
        if model_type not in made:
            directory = tmp_path_factory.mktemp(model_type)
            source = directory / "model"
            if model_type in SMALL:
                save(random_model(model_type), source, fused=False)
            else:
                save_folder_model(folder_model(model_type), source)
            convert_checkpoint(source, directory / "store", max_level=8, layout="auto", dense_bits=16)
            made[model_type] = directory / "store"
        return made[model_type]

    return store


@pytest.fixture
def small_blocks(monkeypatch):
    """Layers with a window keep some eighty tokens, and what goes is filled with numbers that are not zero."""
    for module in (blocks, kept_index, kept_sequences):
        monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 64)
    monkeypatch.setattr(windows, "SLACK", 8)

    def spoil(head: torch.Tensor, first: int, end: int | None = None) -> None:
        head.view(torch.uint8).flatten()[first:end] = 0x41

    monkeypatch.setattr("edgemoe.kv.window_rows.return_pages", spoil)
    drop = MovedRows.drop

    def drop_and_spoil(rows: MovedRows, tokens: range) -> None:
        drop(rows, tokens)
        held = {rows.row(each) + i for each in rows.held for i in range(len(each))}
        for stored in rows._stored:
            free = sorted({*range(stored.shape[1])} - held)
            stored.view(torch.uint8)[:, free] = 0x41

    monkeypatch.setattr(MovedRows, "drop", drop_and_spoil)


def restarted(engine: Engine, directory: Path, tokens: list[int]) -> tuple[Greedy, PrefixCache]:
    """Answers a prompt as a new process does: nothing is in memory, and what earlier ones wrote is on disk."""
    disk = PrefixCache.open(directory, 1 << 30, engine.shape.kv)
    scheduler = Scheduler(engine, keep=True, disk=disk)
    request = run(scheduler, tokens)
    scheduler.close()
    return request, disk


def chunks(engine: Engine, sequence: SequenceKV, ends: list[int]) -> torch.Tensor:
    """Logits of the tokens up to some ends, in a step each."""
    found = []
    for end in ends:
        found.append(engine.all_logits(sequence, TOKENS[sequence.length : end], decode=False))
    return torch.cat(found)


def answers(engine: Engine, sequences: list[SequenceKV], count: int) -> torch.Tensor:
    """Logits of new tokens of some sequences that share their steps."""
    return torch.cat(
        [
            engine.step(Step(tuple(Segment(each, (TOKENS[each.length],)) for each in sequences)))
            for _ in range(count)
        ]
    )


def everything(engine: Engine, new: Callable[[], SequenceKV]) -> list[torch.Tensor]:
    """Prompts in one and in several chunks, answers of three sequences, and sequences that are cropped and copied."""
    one, two, three, copy = (new() for _ in range(4))
    found = [chunks(engine, one, [230]), chunks(engine, two, [70, 71, 190, 200])]
    three.mark(None, 100)
    found.append(chunks(engine, three, [100]))
    with closing(
        engine.run(engine.begin(Step((Segment(three, tuple(TOKENS[100:300]), PromptAttention()),))))
    ) as run:
        next(run)  # a step that does not end changes nothing
    found.append(chunks(engine, three, [190]))
    found.append(answers(engine, [one, two, three], 70))
    for sequence, length in ((one, one.length - 8), (three, 100)):
        assert sequence.crop(length) == length
    assert copy.copy_prefix(two, two.length - 3) == copy.length == two.length - 3
    found.append(answers(engine, [one, two, copy], 5))
    return [*found, chunks(engine, three, [230]), answers(engine, [three], 40)]


@pytest.mark.e2e
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("model_type", "kv", "moves"),
    [
        *(("gpt_oss", "q8_0", False), ("mixtral", "q4_0", False)),
        *(("gemma4_text", "q8_0", True), ("mixtral", "bf16", True)),
        pytest.param("gemma4_text", "bf16", False, marks=pytest.mark.folders),
        pytest.param("gpt_oss", "bf16", True, marks=pytest.mark.folders),
    ],
)
def test_answers_have_the_bits_of_sequences_that_keep_all_tokens(
    open_engine, store_of, monkeypatch, model_type, kv, moves
):
    """With sinks; with layers of two sizes; with a window in every layer, in fused decode; and where rows move."""
    engine = open_engine(store_of(model_type), context=320, parallel=3, kv=kv)
    shape, made = engine.shape.kv.moving() if moves else engine.shape.kv, list[SequenceKV]()
    if moves:
        monkeypatch.setattr(engine.runner, "fused", None)

    def with_windows() -> SequenceKV:
        made.append(SequenceKV(shape, 320))
        return made[-1]

    assert {part.window for part in shape.parts} > {0} or model_type == "mixtral"
    assert not SequenceKV(shape.without_windows(), 320).windows
    got = everything(engine, with_windows)
    want = everything(engine, lambda: SequenceKV(shape.without_windows(), 320))
    assert all(map(torch.equal, got, want))
    assert all(each.windows.ranges[0].start for each in made)
    assert max(sum(map(len, each.windows.ranges)) for each in made) <= 2 * most_tokens(0) // 3


@pytest.mark.e2e
def test_a_conversation_goes_on_after_its_prompt_and_where_others_left_it(open_engine, store_of):
    """Templates that drop an answer's reasoning do that; where no window is kept all tokens are computed again."""
    engine = open_engine(store_of("gpt_oss"), context=CONTEXT, parallel=2)
    scheduler = Scheduler(engine, keep=True)
    first = run(scheduler, TOKENS[:1000], 350)
    dropped = run(scheduler, [*TOKENS[:1000], 5, 6, 7])
    branches = [run(scheduler, [*TOKENS[:400], *[9 + i] * 600]) for i in range(3)]
    whole = run(scheduler, [*first.tokens, 3, 4])
    assert (first.cached, dropped.cached, whole.cached) == (0, 1000, 1349)
    assert [each.cached for each in branches] == [0, 400, 400]
    check_kept(scheduler)
    scheduler.forget()
    for request in (dropped, *branches):
        assert_right(engine, request)


def test_blocks_on_disk_have_the_window_before_their_end_alone(open_engine, store_of, tmp_path):
    """A prompt is read where a chain ended; a shared beginning is computed once more, and is on disk from then on."""
    engine, counts = open_engine(store_of("gpt_oss"), context=CONTEXT), list[tuple[int, int]]()
    prompts = [TOKENS[:1500], [*TOKENS[:1500], 5], *([*TOKENS[:600], *[9 + i] * 400] for i in range(3))]
    for prompt in prompts:
        request, disk = restarted(engine, tmp_path, prompt)
        counts.append((request.cached, disk.counts().blocks_written))
        assert_right(engine, request)
    # Five blocks, and the last one's window; one more block, and the windows of two ends; the same of one end.
    assert counts == [(0, 5 + 1), (5 * BLOCK, 0), (0, 1 + 3), (2 * BLOCK, 1 + 1), (2 * BLOCK, 1 + 1)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_window_that_is_not_on_disk_any_more_is_computed(open_engine, store_of, tmp_path, damaged):
    """A file that has left, or is damaged, costs tokens and no bit."""
    engine = open_engine(store_of("gpt_oss"), context=CONTEXT)
    restarted(engine, tmp_path, TOKENS[:1500])
    root = Scheduler(engine, keep=True).kept_sequences.roots.of(1500)
    last = path_of(tmp_path, window_digest(chain(root, np.array(TOKENS[:1500]))[5]))
    raw = bytearray(last.read_bytes())
    raw[-5] ^= 1
    last.write_bytes(raw) if damaged else last.unlink()
    request, disk = restarted(engine, tmp_path, TOKENS[:1500])
    assert (request.cached, disk.counts().dropped, disk.counts().blocks_written) == (0, damaged, 2 - damaged)
    assert_right(engine, request)


@pytest.mark.e2e
@pytest.mark.usefixtures("small_blocks")
def test_any_order_of_requests_has_the_bits_of_all_tokens(open_engine, store_of, tmp_path, monkeypatch):
    """Prompts over few stems and earlier answers, some cancelled, two at a time; restarts, and files that are gone."""
    monkeypatch.setattr(kept_sequences, "READ_BYTES", 1)
    engine, other = (open_engine(store_of("mixtral"), context=320, parallel=2, kv="q8_0") for _ in range(2))
    other.sequences = Sequences(other.shape.kv.without_windows(), other.plan, other.memory, None)
    rng, ended = random.Random(0), list[Greedy]()
    for _ in range(2):
        disk = PrefixCache.open(tmp_path, 1 << 30, engine.shape.kv)
        scheduler = Scheduler(engine, Pace(chunk=rng.choice([16, 100]), every=1), keep=True, disk=disk)
        for _ in range(4):
            requests = [Greedy(drawn(rng, ended), rng.choice([1, 3, 50])) for _ in range(3)]
            leaves = rng.choice([None, rng.randint(0, 20)])
            for request in requests:
                scheduler.submit(request)
            for step in count():
                if step == leaves:
                    scheduler.cancel(requests[0])
                if all(request.ended for request in requests):
                    break
                scheduler.loop.step()
            check_kept(scheduler)
            ended += requests
        scheduler.close()
        for path in rng.sample(sorted(tmp_path.glob("*.kv")), 2):
            path.unlink()
    assert len({request.cached for request in ended}) > 5
    for request in ended:
        if request.rows:
            assert_right(other, request)


def drawn(rng: random.Random, ended: list[Greedy]) -> list[int]:
    """A prompt that begins as another one does, or as it and a part of its answer do."""
    old = rng.choice(ended).tokens if ended and rng.random() < 0.5 else TOKENS[rng.randint(0, 2) :]
    return [*old[: rng.randint(1, 240)], *[rng.randint(3, 60) for _ in range(rng.randint(1, 20))]]


@pytest.mark.skipif(not PAGEMAP.exists(), reason="the system does not list pages")
@pytest.mark.parametrize("kv", [pytest.param("bf16", marks=pytest.mark.folders), "q4_0"])
def test_planned_and_reserved_bytes_hold_the_pages_of_a_sequence(open_engine, store_of, kv):
    """In a long prompt, at its end, in an answer and in a later prompt; a plan has fewer bytes than all tokens take."""
    context = 1 << 15
    engine = open_engine(store_of("gpt_oss"), context=context, kv=kv, prefill_rows=4096)
    shape, sequences = engine.shape.kv, engine.sequences
    assert engine.plan.kv_bytes == shape.bytes_for(context) < 0.7 * shape.without_windows().bytes_for(context)
    sequence = sequences.new(reserve=0)

    def check() -> int:
        storages = [each.untyped_storage() for each in sequence.stored]
        pages = sum(present_pages(each.data_ptr(), each.nbytes()) for each in storages)
        assert pages * PAGE <= sequences.bytes_of(sequence) <= engine.plan.kv_bytes
        return pages

    sequence.mark(700, 1900)
    for end in (1024, 1900, *range(1901, 1990), 6000):
        if end == 6000:
            sequence.mark(None, 6000)
        sequences.reserve(sequence, end)
        tokens = tuple(TOKENS[i % 2000] for i in range(sequence.length, end))
        with closing(engine.run(engine.begin(Step((Segment(sequence, tokens, PromptAttention()),))))) as run:
            next(run)  # a step that does not end
        before = check()
        sequence.require(1)
        assert check() < before or end < 6000
        for _ in engine.run(engine.begin(Step((Segment(sequence, tokens, PromptAttention()),)))):
            check()
    before = check()
    assert sequence.crop(700) == 700
    assert check() < before or kv == "q4_0"  # a page has several windows there
    sequences.end(sequence)
    assert engine.memory.kv_bytes == 0


@pytest.mark.e2e
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.folders)])
@pytest.mark.parametrize("model_type", ["gpt_oss", pytest.param("gemma4_text", marks=pytest.mark.folders)])
def test_a_device_keeps_windows_in_the_memory_of_its_plan(
    open_engine, store_of, monkeypatch, model_type, compiled
):
    """Rows move where tokens go: the bits of a sequence in RAM, with compiled attention and with torch's."""
    context = 1 << 13
    directory, prompt = store_of(model_type), [TOKENS[i % 2000] for i in range(2600)]
    settings = RunSettings(levels=(8,), exact=True)
    store = in_planes(directory, DoubleDevice())
    plan = store.plan(vram_limit=None, settings=settings, context=context)
    assert plan.kv_bytes < 0.9 * store.shape.kv.without_windows().bytes_for(context)
    if not compiled:
        monkeypatch.setattr("edgemoe.layers.attention._by_kernel", lambda query: False)
        monkeypatch.setattr(GroupedQueryAttention, "try_from", lambda *args: None)
    answers = []
    for opened in (store, in_planes(directory, None)):
        with CountedEngine(
            opened, opened.plan(vram_limit=None, settings=settings, context=context), settings
        ) as engine:
            monkeypatch.setattr(engine.runner, "fused", None)
            sequence = engine.sequences.new()
            sequence.mark(300, 2600)
            got = [engine.prefill(sequence, prompt[:end][sequence.length :]) for end in (700, 1900, 2600)]
            got += [engine.step(Step((Segment(sequence, (TOKENS[i],)),)))[0] for i in range(70)]
            assert sequence.crop(2600) == 2600
            got.append(engine.step(Step((Segment(sequence, (9,)),)))[0])
            answers.append(got)
            if opened.device:
                stored = sum(each.untyped_storage().nbytes() for each in sequence.stored)
                assert stored == plan.kv_bytes
                assert all(rows.moved for rows in sequence.window_rows.values())
    assert all(map(torch.equal, *answers))


def test_a_layer_that_sees_more_than_it_keeps_is_refused():
    """Before it attends: tokens that have gone would count as zeros."""
    shape = KVShape((0,), 1, 16, 16, others=(KVShape((1,), 1, 16, 16, window=8),))
    sequence = SequenceKV(shape, 1 << 13)
    sequence.pass_window(0, None, 1)
    sequence.pass_window(1, 8, 1)
    for window in (None, 9):
        with pytest.raises(ModelRefused, match="window of 8 tokens in layer 1"):
            sequence.pass_window(1, window, 1)


def test_a_token_that_a_launch_did_not_end_leaves_no_row():
    """A later crop and the next step would take its row for one of theirs."""
    sequence, places = SequenceKV(KVShape((0,), 1, 16, 16, window=8).moving(), 1 << 13), SequencePlaces()
    sequence.pass_window(0, 8, 30)
    sequence.commit(30)
    places.next_token(sequence)  # of a step that fails
    assert sequence.crop(20) == 20
    sequence.require(1)
    places.next_token(sequence)
    assert sequence.window_rows[0].held == [range(21)]


@pytest.mark.parametrize("seed", range(4))
def test_windows_keep_what_they_say_and_no_more(seed, monkeypatch):
    """Against sets of tokens: every reachable length has its window, and each row that moved has its token."""
    monkeypatch.setattr(blocks, "BLOCK", 16)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 32)
    monkeypatch.setattr(windows, "SLACK", 8)
    rng = random.Random(seed)
    window = rng.randint(1, 40)
    kept, there, length, marks, cropped = Windows(window, drops=True), set[int](), 0, (0, 0), 0
    monkeypatch.setattr(window_rows, "TILE", 16)
    stored = torch.zeros(2, most_rows(most_tokens(window)), 1, dtype=torch.int64)
    rows = MovedRows([stored])
    for _ in range(300):
        if rng.random() < 0.1:
            length = cropped = kept.reach(rng.randint(0, length))
            gone = kept.crop(length)
            marks = tuple(mark if mark <= length else 0 for mark in marks)
        elif rng.random() < 0.1:
            prompt = length + rng.randint(1, 400)
            shared = rng.choice([None, rng.randint(length, prompt)])
            marks = (marks[0] if shared is None else shared, prompt)
            gone = kept.mark(shared, prompt)
        else:
            end = length + rng.choice([1, 1, 1, 20, 300]) if length < marks[1] else length + 1
            end = min(end, max(marks[1], length + 1))
            for start in range(length, end, blocks.BLOCK_ROWS):
                passed, block = kept.passed(start, min(32, end - start)), range(start, min(start + 32, end))
                there -= {token for each in passed for token in each}
                there |= set(block)
                for each in passed:
                    rows.drop(each)
                rows.add(block)
                stored[:, (row := rows.row(block)) : row + len(block), 0] = torch.tensor(block)
                assert len(there) <= most_tokens(window)
                assert set(range(max(start - window, 0), start)) <= there
                assert set(range(max(length - window, 0), length)) <= there
            if rng.random() < 0.2:
                gone = kept.failed()
            else:
                length, gone = end, kept.commit(end)
        there -= {token for each in gone for token in each}
        for each in gone:
            rows.drop(each)
        assert {token for each in rows.held for token in each} == there
        for each in rows.held:
            row = rows.row(each)
            assert row % 16 == each.start % 16
            assert stored[:, row : row + len(each), 0].tolist() == [list(each)] * 2
        assert there == {token for each in kept.ranges for token in each}
        reachable = {each for each in range(length + 1) if kept.reach(each) == each}
        assert all(set(range(max(each - window, 0), each)) <= there for each in reachable)
        assert {
            length,
            max(length - windows.SLACK, cropped),
            *(mark for mark in marks if mark <= length),
        } <= reachable
