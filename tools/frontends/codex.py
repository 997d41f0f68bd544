"""Has the coding agent Codex do a task against a server with a scripted model: `python -m tools.frontends.codex`.

The task is to write a program and run it. The script answers with reasoning and a call for each of the two steps,
and with a sentence at the end; the agent runs the commands in an empty folder, outside of its sandbox. It speaks
/v1/responses, and needs no network beyond this machine.

    npm install --prefix DIR @openai/codex@0.169.0
    python -m tools.frontends.codex --codex DIR/node_modules/.bin/codex --work DIR --transcript docs/frontends/codex.txt
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.frontends.conformance import call
from tools.frontends.scripted import scripted_server

TASK = "Write hello.py, which prints 6 * 7, and run it."

COMMANDS = ("printf 'print(6 * 7)\\n' > hello.py && cat hello.py", "python3 hello.py")
"""Commands of the two turns with a tool."""

THOUGHTS = ("The program comes first.", "Now it can run.")

CONFIG = """\
model = "scripted"
model_provider = "edgemoe"
model_context_window = 65536
web_search = "disabled"

[model_providers.edgemoe]
name = "edgemoe"
base_url = "{url}/v1"
wire_api = "responses"

[agents]
enabled = false

[features]
goals = false
"""
"""The agent's config: tools that are no functions are off, which the server refuses."""


def answer(prompt: str) -> str:
    """The answer of a turn, by the results that the prompt has."""
    done = prompt.count("<tool_response>")
    if done == len(COMMANDS):
        return "hello.py prints 42."
    return f"<think>\n{THOUGHTS[done]}\n</think>\n\n{call('exec_command', cmd=COMMANDS[done])}"


def transcript(events: list[dict[str, Any]]) -> list[str]:
    """The agent's actions, line by line."""
    lines = [f"> {TASK}"]
    for event in events:
        item = event.get("item", {})
        if event["type"] == "item.completed" and item["type"] == "command_execution":
            lines += [
                "",
                f"$ {item['command']}",
                item["aggregated_output"].rstrip(),
                f"(exit {item['exit_code']})",
            ]
        elif event["type"] == "item.completed" and item["type"] in ("agent_message", "reasoning"):
            lines += ["", f"{item['type']}: {item['text']}"]
        elif event["type"] == "turn.completed":
            usage = event["usage"]
            lines += [
                "",
                f"tokens: {usage['input_tokens']} in, {usage['cached_input_tokens']} of them kept, ",
            ]
            lines[-1] += f"{usage['output_tokens']} out"
    return lines


def run(codex: Path, work: Path, url: str) -> list[dict[str, Any]]:
    """Runs the agent on the task; returns its events."""
    home, task = work / "codex-home", work / "task"
    shutil.rmtree(task, ignore_errors=True)
    for folder in (home, task):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(url=url), encoding="utf-8")
    command = [str(codex.resolve()), "exec", "--json", "--skip-git-repo-check", "-C", str(task.resolve())]
    done = subprocess.run(
        [*command, "--dangerously-bypass-approvals-and-sandbox", TASK],
        env=os.environ | {"CODEX_HOME": str(home.resolve())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    """Runs the agent, writes the transcript; returns 0 where the program that it wrote has printed 42."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--codex", type=Path, required=True, help="the agent's program")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the model, the agent and its task"
    )
    parser.add_argument("--transcript", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    with scripted_server(options.work, answer) as (url, _):
        events = run(options.codex, options.work, url)
    lines = transcript(events)
    options.transcript.parent.mkdir(parents=True, exist_ok=True)
    options.transcript.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0 if "42" in lines else 1


if __name__ == "__main__":
    sys.exit(main())
