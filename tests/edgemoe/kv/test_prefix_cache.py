"""KV blocks on disk: written blocks are read, within the limit, whatever is damaged, refused or killed."""

from __future__ import annotations

import ast
import errno
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_disk import CALLS, FaultyDisk
from programs import run_forked

from edgemoe.errors import UserError
from edgemoe.kv import block_writer
from edgemoe.kv.block_files import header_bytes, is_block
from edgemoe.kv.blocks import BLOCK, chain
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.storage.files.lock import StoreLock

SHAPE = KVShape((0, 2), 2, 8, 4)
ROWS = SHAPE.bytes_for(BLOCK)
SIZE = header_bytes(BLOCK) + ROWS
"""Bytes of the first block's file; the others' tokens fit the same header up to four blocks less some tokens."""

TOKENS = np.arange(3 * BLOCK) % 101


def sequence_of(tokens: np.ndarray, shape: KVShape = SHAPE) -> SequenceKV:
    """A sequence whose keys and values are made of its tokens and their places."""
    sequence = SequenceKV(shape, 4 * BLOCK)
    values = torch.tensor(tokens * 7 + np.arange(len(tokens)), dtype=torch.float32).sin().bfloat16()
    sequence.keys[:, :, : len(tokens)] = values[:, None] * torch.arange(1, 9)
    sequence.values[:, :, : len(tokens)] = values[:, None] - torch.arange(4)
    sequence.commit(len(tokens))
    return sequence


def written(directory: Path, tokens: np.ndarray = TOKENS, limit: int = 1 << 30) -> list[bytes]:
    """Writes all blocks of a sequence; returns its hashes."""
    cache, hashes = PrefixCache(directory, limit), chain(b"root" * 4, tokens)
    cache.offer(sequence_of(tokens), hashes, tokens)
    cache.close()
    return hashes


def blocks_read(directory: Path, tokens: np.ndarray = TOKENS) -> int:
    """Reads a sequence's blocks as far as they are there, each with the bytes that were written."""
    cache, hashes = PrefixCache(directory, 1 << 30), chain(b"root" * 4, tokens)
    into, want = SequenceKV(SHAPE, 4 * BLOCK), sequence_of(tokens)
    for index in range(cache.held(hashes)):
        if not cache.read(into, hashes, tokens, index):
            return index
        part = slice(index * BLOCK, (index + 1) * BLOCK)
        assert torch.equal(into.keys[:, :, part], want.keys[:, :, part])
        assert torch.equal(into.values[:, :, part], want.values[:, :, part])
    return cache.held(hashes)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if is_block(path.name))


def test_a_file_has_the_tokens_and_the_rows_of_its_block(tmp_path):
    """Block 1: all tokens up to its end, then keys and values layer by layer and head by head; readable to its user."""
    hashes = written(tmp_path)
    path, sequence = tmp_path / f"{hashes[2].hex()}.kv", sequence_of(TOKENS)
    raw, start = path.read_bytes(), header_bytes(2 * BLOCK)
    rows = (sequence.keys[:, :, BLOCK : 2 * BLOCK], sequence.values[:, :, BLOCK : 2 * BLOCK])
    assert raw[start:] == b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in rows)
    assert TOKENS[: 2 * BLOCK].astype("<i4").tobytes() in raw[:start]
    assert TOKENS[: 2 * BLOCK + 1].astype("<i4").tobytes() not in raw[:start]
    assert path.stat().st_mode & 0o077 == 0
    assert blocks_read(tmp_path) == 3
    assert blocks_read(tmp_path, TOKENS[: 2 * BLOCK + 9]) == 2
    assert blocks_read(tmp_path, TOKENS + 1) == 0


def test_a_device_writes_and_reads_the_files_of_ram(tmp_path):
    """Through copies: the device's rows stay where a block is damaged, and are the file's where it is whole."""
    hashes, cache = chain(b"root" * 4, TOKENS), PrefixCache(tmp_path / "device", 1 << 30)
    kept = sequence_of(TOKENS, SHAPE.moving())
    cache.offer(kept, hashes, TOKENS)
    cache.flush()
    written(tmp_path / "ram")
    ours, theirs = (files(tmp_path / name) for name in ("device", "ram"))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert rows_of_file(ours[0]) == rows_of_file(theirs[0])
    into = SequenceKV(SHAPE.moving(), 4 * BLOCK)
    into.keys.zero_()
    into.values.zero_()
    damaged = tmp_path / "device" / f"{hashes[2].hex()}.kv"
    damaged.write_bytes(flipped(-1)(bytearray(damaged.read_bytes())))
    assert [cache.read(into, hashes, TOKENS, index) for index in range(3)] == [True, False, True]
    cache.close()
    for own, want in ((into.keys, kept.keys), (into.values, kept.values)):
        for index, block in enumerate(own[:, :, : 3 * BLOCK].split(BLOCK, 2)):
            part = want[:, :, index * BLOCK : (index + 1) * BLOCK]
            assert torch.equal(block, torch.zeros_like(part) if index == 1 else part)


def rows_of_file(path: Path) -> bytes:
    """The keys and values in a file, whose header has the secret number of its directory."""
    return path.read_bytes()[-ROWS:]


def flipped(at: int) -> Callable[[bytearray], bytes]:
    def flip(raw: bytearray) -> bytes:
        raw[at] ^= 4
        return bytes(raw)

    return flip


DAMAGES: dict[str, Callable[[bytearray], bytes]] = {
    "magic": flipped(0),
    "version": flipped(8),
    "root": flipped(20),
    "digest": flipped(36),
    "number of bytes": flipped(50),
    "rows' checksum": flipped(58),
    "a token": flipped(70),
    "header's checksum": flipped(64 + 4 * 2 * BLOCK + 1),
    "a row": flipped(-1),
    "cut rows": lambda raw: bytes(raw[:-1]),
    "cut header": lambda raw: bytes(raw[:100]),
    "nothing": lambda raw: b"",
    "more": lambda raw: bytes(raw) + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_dropped_by_name(tmp_path, caplog, damage):
    """Block 1 is damaged: block 0 is read, 2 stays; the file leaves with a warning, and is written anew later."""
    path = tmp_path / f"{written(tmp_path)[2].hex()}.kv"
    path.write_bytes(DAMAGES[damage](bytearray(path.read_bytes())))
    assert blocks_read(tmp_path) == 1
    assert caplog.text.count(str(path)) >= 1
    assert "is dropped from the prefix cache" in caplog.text
    assert not path.exists()
    assert len(files(tmp_path)) == 2
    written(tmp_path)
    assert blocks_read(tmp_path) == 3


def test_a_file_that_was_made_in_another_directory_is_dropped(tmp_path, caplog):
    """It has the right name, tokens and rows, and checksums that another secret number made."""
    foreign, own = tmp_path / "foreign", tmp_path / "own"
    written(foreign)
    for path in files(foreign):
        own.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(path, own)
    assert blocks_read(own) == 0
    assert "is dropped from the prefix cache" in caplog.text
    assert (own / "secret").stat().st_mode & 0o077 == 0
    shutil.copy(foreign / "secret", own)
    for path in files(foreign):
        shutil.copy(path, own)
    assert blocks_read(own) == 3


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    """So is one that any user may write to, and one whose secret number is no longer whole."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(UserError, match="another user"):
        PrefixCache(tmp_path, 1 << 30)
    monkeypatch.undo()
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="any user may"):
        PrefixCache(tmp_path, 1 << 30)
    tmp_path.chmod(0o700)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(UserError, match="5 bytes"):
        PrefixCache(tmp_path, 1 << 30)


def test_a_file_of_another_prompt_or_model_is_dropped_by_name(tmp_path, caplog):
    """A sound file under a wrong name: its root, its hash and its tokens each tell."""
    hashes = written(tmp_path)
    (tmp_path / "other").mkdir(mode=0o700)
    shutil.copy(tmp_path / "secret", tmp_path / "other")
    other = PrefixCache(tmp_path / "other", 1 << 30)
    of_model, tokens = chain(b"moor" * 4, TOKENS), TOKENS + 1
    other.offer(sequence_of(TOKENS), of_model, TOKENS)
    # An equal hash of other tokens, as a collision has it.
    other.offer(sequence_of(tokens), [*hashes[:2], hashes[2]], tokens)
    other.close()
    for name in (of_model[2], hashes[2]):
        (tmp_path / f"{hashes[2].hex()}.kv").write_bytes(
            (tmp_path / "other" / f"{name.hex()}.kv").read_bytes()
        )
        assert blocks_read(tmp_path) == 1
        written(tmp_path)
    assert "of this model and these settings" in caplog.text
    assert "512 tokens of a prompt" in caplog.text


def test_the_least_recently_used_leave_and_tails_before_heads(tmp_path):
    """Under a limit of four blocks, blocks that were read and beginnings of sequences stay; so do foreign files."""
    one, two, three = TOKENS[: 2 * BLOCK], TOKENS[: 2 * BLOCK] + 1, TOKENS[: 2 * BLOCK] + 2
    limit = 4 * SIZE
    (tmp_path / "notes.kv").write_bytes(b"x" * 10 * SIZE)
    for tokens in (one, two):
        written(tmp_path, tokens, limit)
    assert blocks_read(tmp_path, one) == 2
    written(tmp_path, three[:BLOCK], limit)
    assert [blocks_read(tmp_path, tokens) for tokens in (one, two, three)] == [2, 1, 1]
    written(tmp_path, three, limit)
    cache = PrefixCache(tmp_path, 2 * SIZE)
    assert len(files(tmp_path)) == 2
    counts = cache.counts()
    assert (counts.evicted, counts.used_bytes, counts.limit_bytes) == (2, 2 * SIZE, 2 * SIZE)
    assert (tmp_path / "notes.kv").exists()


def test_a_sequence_beyond_the_limit_has_its_beginning_on_disk(tmp_path):
    """Its later blocks do not push its first ones out."""
    written(tmp_path, TOKENS, 2 * SIZE + 1)
    assert blocks_read(tmp_path) == 2


@pytest.mark.e2e
def test_two_processes_write_within_one_limit(tmp_path):
    """Writers take turns; at no moment do the files, incomplete ones included, exceed the limit; each is sound."""
    limit, most, ended = 5 * SIZE, [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            sizes = []
            for path in files(tmp_path):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    caches = [PrefixCache(tmp_path, limit) for _ in range(2)]
    for n in range(8):
        tokens = TOKENS[: 2 * BLOCK] + n
        for cache in caches:
            cache.offer(sequence_of(tokens), chain(b"root" * 4, tokens), tokens)
    for cache in caches:
        cache.close()
    ended.set()
    watcher.join()
    assert 4 * SIZE <= most[0] <= limit
    assert sum(blocks_read(tmp_path, TOKENS[: 2 * BLOCK] + n) for n in range(8)) == 5
    counts = [cache.counts() for cache in caches]
    assert sum(each.blocks_written for each in counts) >= 16
    assert [each.failures for each in counts] == [0, 0]


@pytest.mark.e2e
@pytest.mark.parametrize(("first", "number"), [(1, errno.ENOSPC), (2, errno.EIO), (3, errno.EACCES)])
def test_a_disk_that_refuses_a_call_costs_a_warning(tmp_path, caplog, first, number):
    """Each call of a write fails with one of the numbers, and all later ones of its kind: no error, sound files."""
    disk = None
    for at in range(first, 200, 3):
        directory = tmp_path / str(at)
        caplog.clear()
        cache, hashes = PrefixCache(directory, 1 << 30), chain(b"root" * 4, TOKENS)
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, at, number, stays=True)
            for _ in range(2):
                cache.offer(sequence_of(TOKENS), hashes, TOKENS)
            cache.close()
        if len(disk.calls) < at:
            break
        assert len([each for each in caplog.records if each.levelno == logging.WARNING]) <= 1, at
        blocks_read(directory)  # each that is there is sound
        written(directory)
        assert blocks_read(directory) == 3
        assert len(files(directory)) == 3
    assert at > 20
    assert {"write", "fsync", "replace"} <= {*disk.calls}


def test_a_directory_that_may_not_be_written_is_read(tmp_path, caplog, monkeypatch):
    """Reads and answers go on; one warning names the directory."""
    written(tmp_path, TOKENS[: 2 * BLOCK])
    real = os.open

    def refuse(path: object, flags: int, *args: int, **options: object) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert blocks_read(tmp_path) == 2
    for _ in range(2):
        written(tmp_path)
    cache, hashes = PrefixCache(tmp_path, 1 << 30), chain(b"root" * 4, TOKENS)
    caplog.clear()
    for _ in range(2):
        cache.offer(sequence_of(TOKENS), hashes, TOKENS)
    cache.close()
    assert caplog.text.count(f"{tmp_path}, the prefix cache, is not written to") == 1
    assert cache.counts().failures == 2


def killed_child(at: int, directory: Path) -> bool:
    """Writes a sequence in a process that is killed at its call `at`; False: it has ended before."""
    child = os.fork()
    if not child:
        count, lock = [0], threading.Lock()

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                with lock:
                    count[0] += 1
                    if count[0] == at:
                        if real is os_write:
                            os_write(args[0], bytes(args[1])[:7])  # killed within the call
                        os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            return call

        os_write = os.write
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            written(directory)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_at_every_step(work: Path) -> tuple[int, set[tuple[int, int]]]:
    """Kills a write at each of its calls, and checks what it leaves: returns kills, and (files, incomplete ones)."""
    at, kills, states = 0, 0, set()
    before = TOKENS[: 2 * BLOCK] + 1
    while True:
        at, directory = at + 1, work / str(at)
        written(directory, before)
        if not killed_child(at, directory):
            return kills, states
        kills += 1
        left = files(directory)
        states.add((len(left), sum(path.name.endswith(".partial") for path in left)))
        assert blocks_read(directory, before) == 2
        assert blocks_read(directory) == sum(path.suffix == ".kv" for path in left) - 2
        written(directory)
        assert blocks_read(directory) == 3
        assert len(files(directory)) == 5


@pytest.mark.e2e
def test_a_kill_at_any_step_of_a_write_loses_nothing_that_was_complete(fast):
    """After each: files of before are whole, new ones are whole or absent, and the next writer clears what is left.

    In a process without other threads, as each kill is of a fork.
    """
    code = (
        "import sys, pathlib, test_prefix_cache as t; print(t.kill_at_every_step(pathlib.Path(sys.argv[1])))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = run_forked("-c", code, fast, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    kills, states = ast.literal_eval(done.stdout)
    assert kills > 20
    assert states >= {(2, 0), (3, 1), (3, 0), (4, 1), (4, 0), (5, 1), (5, 0)}


def test_rows_that_may_change_are_given_up_where_a_write_hangs(tmp_path, monkeypatch, caplog):
    """The sequence is released after PATIENCE; nothing of it appears later, and nothing more is written."""
    monkeypatch.setattr(block_writer, "PATIENCE", 0.1)
    go_on, real = threading.Event(), os.fsync

    def hang(fd: int) -> None:
        assert go_on.wait(30)
        real(fd)

    monkeypatch.setattr(os, "fsync", hang)
    cache, hashes, sequence = PrefixCache(tmp_path, 1 << 30), chain(b"root" * 4, TOKENS), sequence_of(TOKENS)
    cache.offer(sequence, hashes, TOKENS)
    cache.release(sequence)
    sequence.keys.fill_(0)
    assert "hangs: a write takes more than" in caplog.text
    cache.offer(sequence, hashes, TOKENS)
    thread = cache._writer._thread
    go_on.set()
    cache.close()
    thread.join(10)
    assert not thread.is_alive()
    assert files(tmp_path) == []


def test_a_busy_directory_is_waited_for_and_given_up(tmp_path, monkeypatch):
    """While another process writes nothing is lost; where that takes longer than PATIENCE the rows are released."""
    tokens, hashes = TOKENS, chain(b"root" * 4, TOKENS)
    cache, sequence = PrefixCache(tmp_path, 1 << 30), sequence_of(TOKENS)
    with StoreLock(tmp_path, exclusive=True):
        cache.offer(sequence, hashes, tokens)
        assert cache._writer.written == 0
    cache.flush()
    assert blocks_read(tmp_path) == 3
    for path in files(tmp_path):
        path.unlink()
    monkeypatch.setattr(block_writer, "PATIENCE", 0.2)
    with StoreLock(tmp_path, exclusive=True):
        cache.offer(sequence, hashes, tokens)
        cache.release(sequence)
    cache.close()
    assert files(tmp_path) == []
    assert cache.counts().failures == 0


def test_what_cannot_have_a_cache_is_refused(tmp_path):
    """Windows on a device, a limit below a block, and a directory that cannot be made."""
    with pytest.raises(UserError, match=r"a model on the CPU, .* windows of 40 tokens"):
        PrefixCache.open(tmp_path, 1 << 30, replace(SHAPE, window=40).moving())
    with pytest.raises(UserError, match=r"a block of 256 tokens, for --prefix-cache-limit, got 4\.1 KB"):
        PrefixCache.open(tmp_path, 4096, SHAPE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a directory at"):
        PrefixCache.open(tmp_path / "file", 1 << 30, SHAPE)
