"""Runs the conformance suite canitoolcall against a scripted model: `python -m tools.frontends.conformance`.

The suite asks for calls of tools, whole and streamed, and compares both; the script writes what a model would. What is
tested is the rest: chat template, response parser, grammar of a forced call, and the shapes of the protocol.

    pip install canitoolcall==0.1.1
    python -m tools.frontends.conformance --work DIR
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tools.frontends.scripted import scripted_server


def call(name: str, **arguments: object) -> str:
    """A call as a model writes it."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


PEOPLE = [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}]
EVENT = call(
    "create_event",
    title="Design review",
    start="2026-10-01T15:00:00Z",
    attendees=PEOPLE,
    location={"city": "Berlin", "room": "4.12"},
)
NOTE = call("save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀")
THOUGHT = "<think>\n9.9 is 9.90, which is more than 9.11.\n</think>\n\n"

ANSWERS = {
    "What's the weather in Paris right now?": call("get_weather", city="Paris"),
    "in Paris and in Tokyo": f"{call('get_weather', city='Paris')}\n{call('get_weather', city='Tokyo')}",
    "What is 17 + 25?": "42",
    "Create an event titled": EVENT,
    "Save a note titled": NOTE,
    "What time is it on the server?": call("get_server_time"),
    "Tell me something about Lisbon": "Lisbon is a city.",
    '"temp_c": 18': "It is 18 degrees in Paris, and the sky is clear.",
    "9.11 or 9.9": f"{THOUGHT}{call('record_answer', answer='9.9')}",
}
"""Words of a prompt -> the answer."""


def answer(prompt: str) -> str:
    """The answer to one of the suite's prompts; the one of Lisbon must be forced into a call."""
    return next((text for words, text in ANSWERS.items() if words in prompt), "I do not know.")


def probe(url: str) -> list[str]:
    """The command that checks a server."""
    return [sys.executable, "-m", "canitoolcall", "probe", "--base-url", f"{url}/v1", "--model", "scripted"]


def main() -> int:
    """Runs the suite; returns its exit status, 0 where each check has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model")
    options = parser.parse_args()
    with scripted_server(options.work, answer, context=4096) as (url, _):
        return subprocess.run(probe(url), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
