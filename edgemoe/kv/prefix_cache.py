"""KV blocks on disk, for prompts that begin as earlier ones did, in this process or before it (docs/decisions/0040).

Blocks are written in the background (kv.block_writer), and read by the thread that runs steps, straight into the rows
of a sequence, or through RAM into the memory of a device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.kv import block_files, blocks
from edgemoe.kv.block_files import Block
from edgemoe.kv.block_writer import BlockWriter, Chain
from edgemoe.kv.blocks import Tokens, window_digest
from edgemoe.kv.file_rows import FileRows
from edgemoe.kv.own_directory import own_directory
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.storage.sizes import format_least, format_size

READ_AHEAD = 3
"""Blocks that the system begins to read before they are wanted."""

_log = logging.getLogger("edgemoe")


@dataclass(frozen=True)
class PrefixCacheCounts:
    """The contents of a prefix cache, and its counts since it was opened.

    Args:
        tokens_read: tokens for which KV came from disk.
        blocks_read, bytes_read: files of these tokens.
        blocks_written, bytes_written: files that are complete.
        evicted: files that left for others.
        dropped: files that were damaged, or had another block.
        failures: chains whose writing, and blocks whose reading, the operating system refused.
        used_bytes, limit_bytes: bytes of all files in the directory, and their limit.
    """

    tokens_read: int
    blocks_read: int
    bytes_read: int
    blocks_written: int
    bytes_written: int
    evicted: int
    dropped: int
    failures: int
    used_bytes: int
    limit_bytes: int


class PrefixCache:
    """A directory of KV blocks within a limit of bytes. For one thread at a time, `counts` excepted.

    A refusal of the disk costs a warning, the first of each kind, and nothing else.

    Args:
        directory: made where it is missing; other processes may use it as well.
        limit: bytes of all its blocks, of any model, incomplete ones included.
        automatic: blocks are read and written; False: from `start` on.
        window: tokens of the longest window of a layer, whose rows have files of their own; 0: no layer has one.

    Raises:
        UserError: the directory cannot be made, or is not the user's own.
    """

    def __init__(self, directory: Path, limit: int, *, automatic: bool = True, window: int = 0) -> None:
        self.directory, self.limit, self.automatic, self._window = directory, limit, False, window
        self._secret = own_directory(directory)
        self._read = self._bytes_read = self._dropped = self._failures = 0
        self._warned = set[str]()
        self._writer = BlockWriter(directory, limit, self._secret, self._write_failed)
        if automatic:
            self.start()

    @classmethod
    def open(cls, directory: Path, limit: int, shape: KVShape, *, automatic: bool = True) -> PrefixCache:
        """Opens the cache of a model.

        Args:
            directory, limit, automatic: see the class.
            shape: the shape of the model's KV.

        Raises:
            UserError: the KV cannot be cut at a block, or no block fits the limit; or a device moves
                rows of windows; as the class.
        """
        if shape.linear:
            wanted = "a model whose KV can be cut after any token, for a prefix cache"
            found = "one whose linear-attention layers have a state after a few tokens alone"
            raise UserError(wanted, found, "leave --prefix-cache-dir out")
        if shape.moves and shape.longest_window:
            wanted = "layers that keep all tokens, or a model on the CPU, for a prefix cache"
            found = f"windows of {shape.longest_window} tokens, whose rows move in a GPU's memory"
            raise UserError(wanted, found, "give --device cpu, or leave --prefix-cache-dir out")
        files = 2 if shape.longest_window else 1
        least = files * block_files.header_bytes(blocks.BLOCK) + shape.bytes_for(blocks.BLOCK)
        if limit < least:
            wanted = (
                f"at least {format_least(least)}, a block of {blocks.BLOCK} tokens, for --prefix-cache-limit"
            )
            raise UserError(wanted, format_size(limit), "give 4GB or another size")
        return cls(directory, limit, automatic=automatic, window=shape.longest_window)

    def counts(self) -> PrefixCacheCounts:
        """Returns the counts so far. For any thread."""
        writer = self._writer
        return PrefixCacheCounts(
            tokens_read=self._read * blocks.BLOCK,
            blocks_read=self._read,
            bytes_read=self._bytes_read,
            blocks_written=writer.written,
            bytes_written=writer.written_bytes,
            evicted=writer.evicted,
            dropped=self._dropped,
            failures=self._failures,
            used_bytes=writer.used_bytes,
            limit_bytes=self.limit,
        )

    def start(self) -> None:
        """Starts to read and write blocks; blocks beyond the limit leave."""
        self.automatic = True
        try:
            self._writer.trim()
        except (EdgemoeError, OSError) as error:
            self._write_failed(error)

    def begun(self, hashes: Sequence[bytes]) -> int:
        """Returns the number of blocks of a sequence, from its first, that have files, perhaps without windows' rows.

        Args:
            hashes: the hashes of its beginnings (kv.blocks.chain).
        """
        begun = 0
        if self.automatic:
            while begun + 1 < len(hashes) and self._path(hashes[begun + 1]).exists():
                begun += 1
        return begun

    def held(self, hashes: Sequence[bytes]) -> int:
        """Returns how many blocks of a sequence, from its first, can be read: the last ones with their windows' files.

        Args:
            hashes: the hashes of its beginnings (kv.blocks.chain).
        """
        held = self.begun(hashes)
        while held and not all(
            self._path(window_digest(hashes[block + 1])).exists()
            for block in reversed(range(self.first_windowed(held), held))
        ):
            held -= 1
        return held

    def first_windowed(self, end: int) -> int:
        """Returns the first of the blocks before block `end` of which layers with a window need their rows."""
        return max(end * blocks.BLOCK - self._window, 0) // blocks.BLOCK if self._window else end

    def read(
        self,
        sequence: SequenceKV,
        hashes: Sequence[bytes],
        tokens: Tokens,
        index: int,
        *,
        windowed: bool = False,
    ) -> bool:
        """Reads a block's rows into a sequence; the rows are undefined where that fails.

        Args:
            sequence: has reserved the block's tokens; its length stays as it is.
            hashes: the hashes of the prompt's beginnings.
            tokens: int64 [n] of the prompt.
            index: the index of the block.
            windowed: reads the rows of layers with a window too.

        Returns:
            whether the rows belong to the tokens. A file that is damaged or has another block is dropped, with a
            warning.
        """
        end = (index + 1) * blocks.BLOCK
        for later in hashes[index + 2 : index + 2 + READ_AHEAD]:
            block_files.read_ahead(self._path(later))
        digests = [hashes[index + 1], window_digest(hashes[index + 1])][: 2 if windowed else 1]
        sizes = [
            self._read_file(
                Block(hashes[0], digest, tokens[:end], self._secret),
                sequence.rows(end - blocks.BLOCK, end, windowed=number == 1),
                index,
            )
            for number, digest in enumerate(digests)
        ]
        if not all(sizes):
            return False
        self._read += 1
        self._bytes_read += sum(sizes)
        return True

    def _read_file(self, block: Block, into: FileRows, index: int) -> int:
        """Reads the file of a block; returns its bytes, 0 where it has the rows of other tokens."""
        path = self._path(block.digest)
        try:
            size = block_files.read_block(path, block, into.views)
            into.store()
        except FileNotFoundError:  # it has left for another process's block
            return 0
        except EdgemoeError as error:
            self._dropped += 1
            _log.warning("%s is dropped from the prefix cache: %s", path, error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return 0
        except OSError as error:
            self._failed("is not read", error)
            return 0
        block_files.touch(path, time.time_ns(), index)
        return size

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Removes the blocks of a sequence whose KV is wrong."""
        for digest in (each for block in hashes[1:] for each in (block, window_digest(block))):
            with suppress(OSError):
                self._path(digest).unlink(missing_ok=True)

    def offer(self, sequence: SequenceKV, hashes: Sequence[bytes], tokens: Tokens) -> None:
        """Has the blocks of a sequence that are not on disk yet written in the background.

        Args:
            sequence: the sequence; the rows of all blocks stay as they are until `release` returns.
            hashes: the hashes of its beginnings, none longer than the sequence.
            tokens: int64 [n], the tokens of these beginnings.
        """
        if self.automatic and not self._writer.stuck and len(hashes) > 1:
            windowed = sequence.windows.whole_blocks() if sequence.windows else frozenset[int]()
            self._writer.offer(Chain(sequence, hashes, tokens, windowed))

    def release(self, sequence: SequenceKV) -> None:
        """Waits until no block of a sequence is being written; blocks that take too long are given up."""
        self._writer.release(sequence)

    def flush(self) -> None:
        """Waits until everything offered is written, or given up."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what was offered, and ends the writer's thread. Idempotent."""
        self._writer.close()
        self.automatic = False

    def _path(self, digest: bytes) -> Path:
        return block_files.path_of(self.directory, digest)

    def _write_failed(self, error: Exception) -> None:
        self._failed("hangs" if isinstance(error, TimeoutError) else "is not written to", error)

    def _failed(self, what: str, error: Exception) -> None:
        """Counts a failure, and warns of the first of its kind."""
        self._failures += 1
        if what not in self._warned:
            self._warned.add(what)
            found = error.finding if isinstance(error, EdgemoeError) else error
            why = "answers go on without it, and later failures are not reported"
            _log.warning("%s, the prefix cache, %s: %s; %s", self.directory, what, found, why)
