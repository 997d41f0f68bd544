"""Prompts whose beginning another process has computed: its KV comes from disk, with the bits of computing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import SMALL, random_model, save
from greedy import Greedy, assert_right, run
from integrity import check_kept
from pairwise import pairwise

from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import NotFinite, UserError
from edgemoe.kv.blocks import BLOCK
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.models.conversion.run import convert_checkpoint

SYSTEM = [(7 * i) % 290 + 3 for i in range(2 * BLOCK + 60)]
"""Two blocks, and a part of the third."""

LIMIT = 1 << 30


@pytest.fixture
def started() -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers as a new process has them: nothing in memory, and what earlier ones left on disk."""
    with ExitStack() as stack:

        def start(engine: Engine, directory: Path, **options: Any) -> Scheduler:
            cache = PrefixCache.open(directory, LIMIT, engine.shape.kv)
            scheduler = Scheduler(engine, keep=True, disk=cache, **options)
            stack.callback(scheduler.close)
            return scheduler

        yield start


@pytest.mark.e2e
@pytest.mark.parametrize("kv", ["bf16", "q8_0", "q4_0"])
def test_a_restart_reads_whole_blocks_and_has_the_bits_of_computing_them(
    open_engine, started, tiny_store, tmp_path, kv
):
    """In every format of keys and values; a conversation of another one is computed."""
    engine = open_engine(tiny_store, level=4, context=4 * BLOCK, kv=kv)
    first = started(engine, tmp_path)
    request = run(first, SYSTEM)
    first.close()
    assert len(list(tmp_path.glob("*.kv"))) == 2
    second = started(engine, tmp_path)
    again, branch = run(second, SYSTEM), run(second, [*SYSTEM[: BLOCK + 40], *[9] * 80])
    assert (request.cached, again.cached, branch.cached) == (0, 2 * BLOCK, BLOCK + 40)
    assert second.disk.counts().tokens_read == 2 * BLOCK
    check_kept(second)
    second.close()
    other = open_engine(tiny_store, level=4, context=4 * BLOCK, kv="bf16" if kv != "bf16" else "q8_0")
    assert run(started(other, tmp_path), SYSTEM).cached == 0
    assert torch.equal(torch.stack(again.rows), torch.stack(request.rows))
    for each in (again, branch):
        assert_right(engine, each)


FAMILIES = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"]
"""Latents; sinks and windows; windows; a norm of queries and keys."""


@pytest.mark.e2e
@pairwise(alone=["model_type"], model_type=FAMILIES, kv=["bf16", "q8_0", "q4_0"])
def test_every_kind_of_attention_reads_what_it_wrote(open_engine, started, tmp_path, model_type, kv):
    """The logits after a prompt from disk are the computed one's, bit for bit.

    Chunks end with the block: with latents a prompt's first step has other roundings than the steps that continue it.
    """
    assert set(FAMILIES) <= set(SMALL)
    source = save(random_model(model_type), tmp_path / "model", fused=False)
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine = open_engine(tmp_path / "store", context=2 * BLOCK, kv=kv)
    prompt = [(5 * i) % 50 + 3 for i in range(BLOCK + 20)]
    first = started(engine, tmp_path / "kv", pace=Pace(BLOCK))
    want = run(first, prompt)
    first.close()
    second = started(engine, tmp_path / "kv", pace=Pace(BLOCK))
    got = run(second, prompt)
    second.close()
    assert (want.cached, got.cached) == (0, BLOCK)
    assert torch.equal(torch.stack(got.rows), torch.stack(want.rows))


@pytest.mark.e2e
def test_states_of_linear_attention_are_refused_by_name(open_engine, tmp_path):
    """Such a model has one state, after its last token, and no KV to cut at a block."""
    source = save(random_model("qwen3_next"), tmp_path / "model", fused=False)
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine = open_engine(tmp_path / "store")
    with pytest.raises(UserError, match="linear-attention layers have a state"):
        PrefixCache.open(tmp_path / "kv", LIMIT, engine.shape.kv)
    assert not (tmp_path / "kv").exists()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"levels": (4,)}, 0),
        ({"retention": 0.75}, 0),
        ({"exact": False}, 0),
        ({"importance": "load"}, 0),
        ({"speculate": "full"}, 2 * BLOCK),
    ],
)
def test_blocks_of_other_settings_are_not_found(open_engine, started, tiny_store, tmp_path, changes, read):
    """A setting that changes levels has blocks of its own; one that does not shares them."""
    engine = open_engine(tiny_store, levels=(4, 2), exact=True, retention=0.5, context=4 * BLOCK)
    first = started(engine, tmp_path)
    run(first, SYSTEM)
    first.close()
    engine.configure(engine.settings.with_(**changes))
    assert run(started(engine, tmp_path), SYSTEM).cached == read


@pytest.mark.e2e
def test_blocks_of_another_store_are_not_found(open_engine, started, tiny_store, checkpoint, tmp_path):
    """A checkpoint at fewer levels is another store, whose fingerprint differs."""
    first = started(open_engine(tiny_store, level=4, context=4 * BLOCK), tmp_path / "kv")
    run(first, SYSTEM)
    first.close()
    convert_checkpoint(checkpoint, tmp_path / "store", max_level=4, layout="auto", dense_bits=16)
    other = started(open_engine(tmp_path / "store", level=4, context=4 * BLOCK), tmp_path / "kv")
    assert run(other, SYSTEM).cached == 0
    other.close()
    assert len(list((tmp_path / "kv").glob("*.kv"))) == 4


def test_a_prompt_is_on_disk_before_its_answer_ends(open_engine, started, tiny_store, tmp_path):
    """A process that is killed while it decodes has left the prompt."""
    engine = open_engine(tiny_store, level=4, context=4 * BLOCK)
    scheduler = started(engine, tmp_path)
    request = Greedy(SYSTEM, 100)
    scheduler.submit(request)
    while not request.trace.token_times:
        scheduler.loop.step()
    scheduler.disk.flush()
    assert not request.ended
    assert scheduler.disk.counts().blocks_written == 2
    scheduler.close()


def test_blocks_are_read_between_the_steps_of_others(open_engine, started, tiny_store, tmp_path, monkeypatch):
    """A prompt whose KV is on disk is read as it would be computed: some blocks, then tokens of running answers."""
    engine = open_engine(tiny_store, level=4, context=4 * BLOCK, parallel=2)
    first = started(engine, tmp_path)
    run(first, SYSTEM)
    first.close()
    monkeypatch.setattr("edgemoe.engine.kept_sequences.READ_BYTES", 1)
    scheduler = started(engine, tmp_path, pace=Pace(every=2))
    other, late = Greedy([5, 6, 7] * 5, 40), Greedy(SYSTEM)
    scheduler.submit(other)
    while len(other.rows) < 4:
        scheduler.loop.step()
    scheduler.submit(late)
    answered = {}  # tokens from disk -> the other's tokens at that time
    while not late.rows:
        scheduler.loop.step()
        answered[late.cached] = len(other.rows)
    assert {*answered} - {0} == {BLOCK, 2 * BLOCK}
    assert answered[BLOCK] + 2 <= answered[2 * BLOCK]
    scheduler.close()
    assert_right(engine, late)


def test_a_cancel_while_blocks_are_read_keeps_what_was_read(
    open_engine, started, tiny_store, tmp_path, monkeypatch
):
    """The sequence has whole blocks, and a client that comes back goes on from there."""
    engine = open_engine(tiny_store, level=4, context=4 * BLOCK)
    first = started(engine, tmp_path)
    run(first, SYSTEM)
    first.close()
    monkeypatch.setattr("edgemoe.engine.kept_sequences.READ_BYTES", 1)
    scheduler = started(engine, tmp_path)
    request = Greedy(SYSTEM)
    scheduler.submit(request)
    scheduler.loop.step()
    scheduler.cancel(request)
    scheduler.wait(request)
    assert request.cached == BLOCK
    tmp_path.rename(tmp_path.with_name("gone"))  # at once: files may still be written
    again = run(scheduler, SYSTEM)
    assert again.cached == BLOCK
    scheduler.close()
    assert_right(engine, again)


def test_memory_and_disk_are_one_path(open_engine, started, tiny_store, tmp_path):
    """Memory gives its part of a prompt, also within a block; the disk has the blocks after it."""
    engine = open_engine(tiny_store, level=4, context=8 * BLOCK)
    first = started(engine, tmp_path)
    long = [*SYSTEM, *SYSTEM]
    run(first, long)
    first.close()
    second = started(engine, tmp_path)
    run(second, [*long[: BLOCK + 100], *[9] * 50])
    read = second.disk.counts().tokens_read
    whole = run(second, long)
    assert read == BLOCK
    assert whole.cached == len(long) // BLOCK * BLOCK
    assert second.disk.counts().tokens_read == BLOCK + whole.cached - BLOCK
    check_kept(second)
    second.close()
    assert_right(engine, whole)


def test_a_damaged_block_behind_tokens_in_memory_costs_its_own_tokens(
    open_engine, started, tiny_store, tmp_path, caplog
):
    """Rows that a failed read has overwritten are computed again, though memory had a part of them."""
    engine = open_engine(tiny_store, level=4, context=8 * BLOCK)
    first = started(engine, tmp_path)
    run(first, SYSTEM)
    first.close()
    second = started(engine, tmp_path)
    run(second, [*SYSTEM[: BLOCK + 100], *[9] * 50])
    for path in tmp_path.glob("*.kv"):
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
    request = run(second, SYSTEM)
    assert request.cached == BLOCK
    assert caplog.text.count("is dropped from the prefix cache") == 1
    second.close()
    assert_right(engine, request)


def test_a_value_that_is_not_finite_leaves_the_disk_too(open_engine, started, tiny_store, tmp_path):
    """Otherwise each restart would read it again."""
    engine = open_engine(tiny_store, level=4, context=4 * BLOCK)
    scheduler = started(engine, tmp_path)
    first = run(scheduler, SYSTEM)
    scheduler.disk.flush()
    assert list(tmp_path.glob("*.kv"))
    scheduler.kept_sequences.index.entries[0].sequence.keys.fill_(float("nan"))
    with pytest.raises(NotFinite):
        run(scheduler, [*first.tokens, 5])
    assert not list(tmp_path.glob("*.kv"))
    scheduler.close()


def test_rows_are_written_before_they_change(open_engine, started, tiny_store, tmp_path, monkeypatch):
    """Memory for one KV: the next prompt takes the first one's place, and finds the first one's blocks complete."""
    engine = open_engine(tiny_store, level=4, context=3 * BLOCK)
    scheduler = started(engine, tmp_path)
    prompts = [[n, *SYSTEM] for n in (3, 4, 5)]
    for prompt in prompts:
        run(scheduler, prompt)
    scheduler.close()
    assert len(list(tmp_path.glob("*.kv"))) == 6
    again = started(engine, tmp_path)
    found = [run(again, prompt) for prompt in prompts]
    assert [each.cached for each in found[:2]] == [2 * BLOCK, 2 * BLOCK]
    again.close()
    for each in found:
        assert_right(engine, each)
