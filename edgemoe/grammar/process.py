"""The process that compiles grammars and follows them: a script that imports neither edgemoe nor torch.

It reads a model's tokens once. For each grammar it starts a process that compiles it, and that one starts a process for
each answer. The operating system ends any of them that computes too long or takes too much memory.

Such a process has two sockets. One carries messages of both directions, with their length in 4 bytes before them; the
process sends one message for each that it gets. The other one carries nothing: the process ends at once, whatever it
computes, when the program closes it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

VOCABULARY_BYTES = 2 << 30
"""Address space of the first process, Python's own included: texts of 256,000 tokens take a quarter of it."""

GRAMMAR_BYTES = 256 << 20
"""Address space that a grammar's process takes in addition, and what an answer's process takes beyond that."""

COMPILE_SECONDS = 5
"""Time of computing for a grammar and its first mask."""

TOKEN_SECONDS = 1
"""Time of computing for one token; the operating system counts whole seconds, and ends it after up to one more."""

MOST_ITEMS = 10_000
"""Items of the parser in a row: an object of 2,000 optional properties."""

MOST_LEXER_STATES = 20_000
"""States of a grammar's lexer, 1 to 2 kB each."""

MOST_LEXER_FUEL = 200_000
"""Work of the lexer for one token, some 15 ms."""

MOST_STEP_ITEMS = 50_000
"""Items of the parser for one token, up to half a second."""

Result = TypeVar("Result")

MASK, ERROR = b"\0", b"\1"
"""First byte of an answer: the tokens that can come next, or why there are none."""

GUESSES = b"?"
"""Last byte of a message of tokens that have not been chosen; a chosen one has 4 bytes alone."""


def main() -> None:
    """Reads a model's tokens, then starts a process for each grammar until its socket is closed."""
    from llguidance import LLTokenizer

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended processes leave nothing to wait for
    with suppress(OSError):  # where memory runs out, the system ends this process before the program
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (VOCABULARY_BYTES, VOCABULARY_BYTES))
    settings, tokenizer = json.loads(received(control)), received(control).decode()
    try:
        table = LLTokenizer(tokenizer, n_vocab=settings["words"], eos_token=settings["ends"])
    except Exception as error:
        send(control, ERROR + str(error).encode())
        return
    special = [token for token in settings["added"] if table.is_special_token(token)]
    send(control, MASK + json.dumps(special).encode())
    start_processes(control, lambda connection: follow_grammar(connection, table))


def start_processes(parent: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Starts a process for each socket that comes, until the parent's is closed."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(parent, 1, 2)
        if len(descriptors) < 2:
            return
        connection, alive = (socket.socket(fileno=one) for one in descriptors)
        with connection, alive:
            if os.fork():
                continue
            try:
                parent.close()
                end_with(alive)
                serve(connection)
            finally:
                os._exit(0)


def end_with(alive: socket.socket) -> None:
    """Has this process ended as soon as the other side closes a socket on which nothing is sent.

    The system then sends SIGIO, whose default action ends a process within any computation.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    watched = select.poll()
    watched.register(alive, 0)
    if watched.poll(0):  # it was closed before
        os._exit(0)


def follow_grammar(connection: socket.socket, table: LLTokenizer) -> None:
    """Compiles the grammar whose text comes first, then starts a process for each answer."""
    from llguidance import LLMatcher, LLParserLimits

    text = received(connection).decode()
    more_memory(GRAMMAR_BYTES)
    limits = LLParserLimits(
        max_items_in_row=MOST_ITEMS,
        max_lexer_states=MOST_LEXER_STATES,
        step_lexer_fuel=MOST_LEXER_FUEL,
        step_max_items=MOST_STEP_ITEMS,
        verbose_errors=False,
    )

    def compiled() -> LLMatcher:
        first = LLMatcher(table, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        first.compute_bitmask()
        return first

    before = own_bytes()
    first = within(COMPILE_SECONDS, compiled)
    if first.is_error():
        send(connection, ERROR + first.get_error().encode())
        return
    send(connection, MASK + str(own_bytes() - before).encode())
    start_processes(connection, lambda answer: follow_answer(answer, first.deep_copy()))


def follow_answer(connection: socket.socket, state: LLMatcher) -> None:
    """Sends the tokens that can come next, as bits, before the first token and after each that comes.

    To several tokens and GUESSES it sends how many of the first of them can come next, one after another.
    """
    more_memory(GRAMMAR_BYTES)
    message = b""
    while True:

        def answer(message: bytes = message) -> bytes:
            if len(message) % 4:
                tokens = memoryview(message)[: -len(GUESSES)].cast("I").tolist()
                return str(state.validate_tokens(tokens)).encode()
            if message:
                state.consume_token(int.from_bytes(message, "little"))
            return bytes(state.compute_bitmask())

        answered = within(TOKEN_SECONDS, answer)
        send(connection, ERROR + state.get_error().encode() if state.is_error() else MASK + answered)
        message = received(connection)


def within(seconds: int, compute: Callable[[], Result]) -> Result:
    """Computes for at most so many seconds; the system ends a process that exceeds them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    return compute()


def more_memory(bytes_: int) -> None:
    """Limits this process's address space to what it has and so much more."""
    most = pages()[0] * resource.getpagesize() + bytes_
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(most, hard), hard))


def own_bytes() -> int:
    """Bytes of memory that this process shares with no file."""
    _, resident, shared, *_ = pages()
    return (resident - shared) * resource.getpagesize()


def pages() -> list[int]:
    """Numbers of pages of this process: its address space, pages in memory, and pages of files among them."""
    return [int(count) for count in Path("/proc/self/statm").read_text().split()]


def send(connection: socket.socket, message: bytes) -> None:
    """Sends a message with its length before it."""
    connection.sendall(len(message).to_bytes(4, "little") + message)


def received(connection: socket.socket) -> bytes:
    """Returns the next message.

    Raises:
        EOFError: the other side has closed its socket.
    """
    return exactly(connection, int.from_bytes(exactly(connection, 4), "little"))


def exactly(connection: socket.socket, count: int) -> bytes:
    """Returns the next `count` bytes. Raises EOFError as `received`."""
    parts = bytearray()
    while len(parts) < count:
        piece = connection.recv(min(count - len(parts), 1 << 20))
        if not piece:
            raise EOFError
        parts += piece
    return bytes(parts)


if __name__ == "__main__":
    with suppress(EOFError):
        main()
