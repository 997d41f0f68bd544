"""Times a prompt whose KV an earlier process has left on disk, and the same prompt computed.

    python -m tools.kv.prefix_cache --text FILE [--model demo] [--tokens 11000] [--context 12288] [--runs 1]
        [--exact 4] [--vram-limit SIZE] [--kv-cache bf16] [--warm] [--work DIR] [--json]

Every answer is given by a process of its own. Of each run the first one finds an empty directory, the second one what
the first has left, read from the disk: its files are dropped from the page cache in between. With --warm the prompt
comes when free blocks have been filled with experts, as a server fills them while no request runs; without it both
processes read experts while they answer. Prints the time to the first token of both, the tokens that were not computed
again, and the bytes on disk. Exit code 1: the answers differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import edgemoe
from edgemoe.api.model import Model
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.storage.files.unbuffered import forget
from tools.command_line import failed, make_parser, positive

ANSWER_TOKENS, SETTLED = 8, 2.0


def answer(options: dict[str, Any]) -> dict[str, Any]:
    """Answers the prompt in this process.

    Raises:
        EdgemoeError: the model cannot be opened, or the text is too short.
    """
    with edgemoe.load(
        options["model"],
        vram_limit=options["vram_limit"],
        context=options["context"],
        exact=options["exact"],
        kv_cache=options["kv_cache"],
        prefix_cache_dir=options["directory"],
    ) as model:
        text = Path(options["text"]).read_text(encoding="utf-8")
        tokens = model.encode(text[: 8 * options["tokens"]])[: options["tokens"]]
        if len(tokens) < options["tokens"]:
            wanted = f"a text of at least {options['tokens']} tokens"
            raise UserError(wanted, f"{len(tokens)}", "give a longer --text, or fewer --tokens")
        if options["warm"]:
            warm_up(model)
        found = model.generate(tokens, max_new_tokens=ANSWER_TOKENS, temperature=0)
        ttft = round(found.ttft_s, 4)
        of_answer = {"ttft_s": ttft, "cached_tokens": found.cached_tokens, "tokens": found.tokens}
    return {**of_answer, "peak_vram_bytes": found.peak_vram_bytes, "vram_limit_bytes": found.vram_limit_bytes}


def warm_up(model: Model) -> None:
    """Waits until the model has filled its free blocks, or reads no further expert for SETTLED seconds."""
    model.keep_warm()
    resident, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED:
        now = sum(sum(levels.values()) for levels in model.status().resident.values())
        if now != resident:
            resident, since = now, time.monotonic()
        time.sleep(0.1)


def one_run(options: dict[str, Any]) -> dict[str, Any]:
    """Answers in two processes, one after the other; returns both answers and the bytes between them.

    Raises:
        UserError: a process fails.
    """
    found: dict[str, Any] = {}
    with TemporaryDirectory(dir=options["work"]) as directory:
        for name in ("cold", "restarted"):
            child = json.dumps(options | {"directory": directory})
            done = subprocess.run(
                [sys.executable, "-m", "tools.kv.prefix_cache", "--child", child],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode:
                raise UserError("two answers", f"exit code {done.returncode}", "read the message above")
            found[name] = json.loads(done.stdout)
            files = [path for path in Path(directory).iterdir() if path.is_file()]
            for path in files:
                with path.open("rb") as file:
                    forget(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        found["disk_bytes"] = sum(path.stat().st_size for path in files)
    found["times"] = round(found["cold"]["ttft_s"] / found["restarted"]["ttft_s"], 1)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("tools.kv.prefix_cache", __doc__)
    parser.add_argument("--text", type=Path, help="UTF-8 text of the prompt")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=positive, default=11_000)
    parser.add_argument("--context", type=positive, default=12_288)
    parser.add_argument("--runs", type=positive, default=1)
    parser.add_argument("--exact", type=int, default=4)
    parser.add_argument("--vram-limit")
    parser.add_argument("--kv-cache", default="bf16")
    parser.add_argument("--warm", action="store_true", help="fill free blocks with experts first")
    parser.add_argument("--work", help="directory for the KV; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    parser.add_argument("--child", help="JSON of the parent's options; gives one answer")
    given = parser.parse_args(argv)
    try:
        if given.child:
            print(json.dumps(answer(json.loads(given.child))))
            return 0
        if given.text is None:
            raise UserError("a text for the prompt", "none", "give --text FILE")
        options = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()
        }
        runs = [one_run(options) for _ in range(given.runs)]
    except EdgemoeError as error:
        return failed("tools.kv.prefix_cache", error)
    for run in runs:
        cold, restarted = run["cold"], run["restarted"]
        line = (
            f"first token after {cold['ttft_s']:.2f} s computed, {restarted['ttft_s']:.3f} s after a restart: "
            f"{run['times']:.1f}x; {restarted['cached_tokens']} of {given.tokens} tokens and "
            f"{run['disk_bytes'] / 1e6:.1f} MB from disk"
        )
        print(json.dumps(run) if given.json else line)
    return int(any(run["cold"]["tokens"] != run["restarted"]["tokens"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
