"""Files of KV blocks in a directory that any number of processes share: their format, reads, ages and bytes.

A file has one block of 256 tokens, and is named for the block's hash (kv.blocks.chain):

    magic, version, number of tokens · hash of no tokens, hash of the block · bytes and xxh3_64 of the rows
    all tokens from the first to the block's last, int32 · xxh3_64 of the above · zeros up to a multiple of 4 KiB
    the block's keys and values (SequenceKV.rows)

Both xxh3_64 have the directory's secret number as their seed (kv.own_directory): a file that was made elsewhere does
not fit. A file appears complete (storage.files.atomic), and never changes. The file that was last used longest ago is
removed first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from edgemoe.errors import BadHeader, ChecksumMismatch, TruncatedFile
from edgemoe.kv.blocks import Tokens
from edgemoe.storage.base import BLOCK as DISK_BLOCK
from edgemoe.storage.files.atomic import PARTIAL
from edgemoe.storage.files.retry import RegularFile, open_regular

SUFFIX = ".kv"

VERSION = 2

_MAGIC = b"edgemoKV"
_HEADER = struct.Struct("<8sII16s16sQQ")
_CHECKSUM = struct.Struct("<Q")
ACTION = "nothing: the block is computed again"
"""Action of errors about a file that is dropped."""


@dataclass(frozen=True)
class Block:
    """A block of a sequence.

    Args:
        root: the hash of no tokens: it covers all that KV depends on except tokens.
        digest: the block's own hash.
        tokens: int64 [n], all from the sequence's first to the block's last.
        secret: the directory's secret number.
    """

    root: bytes
    digest: bytes
    tokens: Tokens
    secret: int

    def header(self, nbytes: int, checksum: int) -> bytes:
        """Returns the start of its file, a multiple of 4 KiB.

        Args:
            nbytes, checksum: size and checksum of the rows.
        """
        fixed = _HEADER.pack(_MAGIC, VERSION, len(self.tokens), self.root, self.digest, nbytes, checksum)
        covered = fixed + _low_words(self.tokens).tobytes()
        whole = covered + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(covered, self.secret))
        return whole.ljust(header_bytes(len(self.tokens)), b"\0")


def path_of(directory: Path, digest: bytes) -> Path:
    """Names the file of a block by its hash."""
    return directory / (digest.hex() + SUFFIX)


def header_bytes(tokens: int) -> int:
    """Bytes of a file's start for so many tokens.

    >>> header_bytes(256), header_bytes(1024)
    (4096, 8192)
    """
    return -(-(_HEADER.size + 4 * tokens + _CHECKSUM.size) // DISK_BLOCK) * DISK_BLOCK


def checksum(rows: Sequence[memoryview], secret: int) -> int:
    """The xxh3_64 of buffers, one after another, with the directory's secret number as its seed."""
    digest = xxhash.xxh3_64(seed=secret)
    for part in rows:
        digest.update(part)
    return digest.intdigest()


def read_block(path: Path, block: Block, into: Sequence[memoryview]) -> int:
    """Reads a block's rows, and verifies all of its file.

    Args:
        path: the path of the file.
        block: the block that the file must have, token for token.
        into: buffers, which are written even where the file is damaged.

    Returns:
        bytes read.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedData: the file is cut, damaged, or has another block.
        OSError: the operating system refuses a read.
    """
    nbytes = sum(map(len, into))
    size = header_bytes(len(block.tokens)) + nbytes
    with open_regular(path) as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise TruncatedFile(f"{size} bytes in {path}", f"{found}", ACTION)
        _advise_sequential(file.fileno())
        stored = _checked_header(path, block, file.read(header_bytes(len(block.tokens))), nbytes)
        _fill(path, file, into)
    if (found := checksum(into, block.secret)) != stored:
        raise ChecksumMismatch(f"checksum {stored:016x} of the rows in {path}", f"{found:016x}", ACTION)
    return size


def _checked_header(path: Path, block: Block, header: bytes, nbytes: int) -> int:
    """Returns the checksum that the rows must have.

    Raises:
        BadHeader: the header is damaged, or of another block.
    """
    end = _HEADER.size + 4 * len(block.tokens)
    magic, version, count, root, digest, rows, stored = _HEADER.unpack_from(header)
    if (magic, version) != (_MAGIC, VERSION):
        raise BadHeader(f"a KV block of version {VERSION} in {path}", f"{magic!r}, version {version}", ACTION)
    (written,) = _CHECKSUM.unpack_from(header, end)
    if (found := xxhash.xxh3_64_intdigest(header[:end], block.secret)) != written:
        raise BadHeader(f"checksum {written:016x} of the header of {path}", f"{found:016x}", ACTION)
    if (root, digest, rows) != (block.root, block.digest, nbytes):
        wanted = f"a block of this model and these settings in {path}"
        raise BadHeader(wanted, f"one of {root.hex()} of {rows} bytes", ACTION)
    same = count == len(block.tokens)
    if not same or not np.array_equal(
        np.frombuffer(header[_HEADER.size : end], "<i4"), _low_words(block.tokens)
    ):
        raise BadHeader(f"the {len(block.tokens)} tokens of a prompt in {path}", "others", ACTION)
    return int(stored)


def _low_words(tokens: Tokens) -> npt.NDArray[np.int32]:
    """The low 32 bits of token ids: all of a word's id; the block's hash covers all bits of ids of pictures."""
    return (tokens & 0xFFFFFFFF).astype("<u4").view("<i4")


def _fill(path: Path, file: RegularFile, into: Sequence[memoryview]) -> None:
    """Reads the next bytes of a file into buffers."""
    for part in into:
        done = 0
        while done < len(part):
            got = file.readinto(part[done:])
            if not got:
                raise TruncatedFile(f"all rows of a block in {path}", "the end of the file", ACTION)
            done += got


def _advise_sequential(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def read_ahead(path: Path) -> None:
    """Has the system begin to read a file, where there is one."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), open_regular(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def touch(path: Path, now: int, place: int) -> None:
    """Records a use, in nanoseconds; of one sequence's blocks the first stays longest, as later ones need it."""
    with suppress(OSError):  # another process has dropped it, or only others may write to it
        os.utime(path, ns=(now - place, now - place))


@dataclass(frozen=True, order=True)
class Entry:
    """A file of the directory, by its age.

    Args:
        used_at: nanoseconds of its last use.
        size: bytes on disk.
        path: the path of the file.
    """

    used_at: int
    size: int
    path: Path


def entries(directory: Path) -> Iterator[Entry]:
    """Yields every file of KV blocks in a directory, including files that are being written."""
    with os.scandir(directory) as found:
        for each in found:
            if is_block(each.name):
                with suppress(FileNotFoundError):  # another process drops files at any time
                    stat = each.stat(follow_symlinks=False)
                    yield Entry(stat.st_mtime_ns, on_disk(stat.st_size), Path(each.path))


def is_block(name: str) -> bool:
    """Whether a file of this name is one of these, complete or not.

    >>> is_block("0" * 32 + ".kv"), is_block("0" * 32 + ".kv.partial"), is_block("notes.kv")
    (True, True, False)
    """
    stem = name.removesuffix(PARTIAL).removesuffix(SUFFIX)
    return len(stem) == 32 and stem != name and all(c in "0123456789abcdef" for c in stem)


def on_disk(size: int) -> int:
    """Bytes of disk that a file of `size` bytes takes.

    >>> on_disk(1), on_disk(8192)
    (4096, 8192)
    """
    return -(-size // DISK_BLOCK) * DISK_BLOCK
