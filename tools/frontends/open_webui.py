"""Drives open-webui in headless Chromium against two servers: `python -m tools.frontends.open_webui`.

One server has the demo model, the other one a scripted model whose answer is long. The script asserts that open-webui
lists both, that the demo answers, that the long answer grows while it comes, and that the stop button ends it in the
server. It takes a screenshot of each, and reaches nothing beyond this machine.

    python3 -m venv VENV && VENV/bin/pip install torch==2.13.0 && VENV/bin/pip install open-webui==0.12.4
    apt-get install chromium
    python -m tools.frontends.open_webui --open-webui VENV/bin/open-webui --work DIR --pictures docs/frontends
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tools.frontends.scripted import scripted_server

QUESTION = "What is the capital of France?"
LONG = "one two three four five six seven eight nine ten " * 4000

SETTINGS = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "WEBUI_AUTH": "false",
    "ENABLE_OLLAMA_API": "false",
    "RAG_EMBEDDING_ENGINE": "openai",  # no model of embeddings is loaded
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
    "ENABLE_AUTOCOMPLETE_GENERATION": "false",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "ENABLE_COMMUNITY_SHARING": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
    "BYPASS_MODEL_ACCESS_CONTROL": "true",
    "DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false}}',  # the demo has no form of calls
}
"""Environment of open-webui: no account, no network, one request an answer."""

CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def wait(until: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {what} within {seconds:g} s, got none: see the output above")
        time.sleep(0.05)


def answers(url: str) -> bool:
    """Whether a server answers by 200."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def program(command: list[str], log: Path, **environment: str) -> Iterator[None]:
    """Runs a program inside the block; its output goes into a file."""
    with log.open("w", encoding="utf-8") as output:
        one = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment)
        try:
            yield
        finally:
            one.terminate()
            one.wait(30)


@contextmanager
def open_webui(path: Path, work: Path, urls: list[str]) -> Iterator[str]:
    """Runs open-webui with these servers inside the block; yields its address."""
    port, data = free_port(), work / "open-webui"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    servers = {
        "OPENAI_API_BASE_URLS": ";".join(f"{url}/v1" for url in urls),
        "OPENAI_API_KEYS": ";".join("none" for _ in urls),
        "DATA_DIR": str(data.resolve()),
        "WEBUI_SECRET_KEY": "a key of this run alone",
    }
    command = [str(path), "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with program(command, work / "open-webui.log", **SETTINGS, **servers):
        wait(lambda: answers(f"{url}/health"), 180, "open-webui")
        yield url


def choose(page: Any, model: str) -> None:
    """Begins a chat with a model."""
    page.goto(f"{page.url.split('/c/')[0].split('/?')[0].rstrip('/')}/?models={model}")
    page.locator("#chat-input").wait_for()


def send(page: Any, text: str) -> None:
    """Sends a message."""
    page.locator("#chat-input").click()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def last_answer(page: Any) -> str:
    """The text of the newest answer on the page."""
    found = page.locator(".chat-assistant")
    return str(found.last.inner_text()) if found.count() else ""


def drive(page: Any, webui: str, scripted: str, pictures: Path) -> None:
    """Lists the models, has one answer, and stops the other."""
    page.goto(webui)
    page.locator("#chat-input").wait_for(timeout=60_000)
    for button in page.get_by_role("button", name="Okay, Let's Go!").all():
        button.click()
    page.locator("[id^=model-selector]").first.click()
    for model in ("demo", "scripted"):
        page.get_by_role("option", name=model).or_(
            page.locator(f"button[data-value='{model}']")
        ).first.wait_for()
    page.screenshot(path=pictures / "open-webui-models.png")
    page.keyboard.press("Escape")
    choose(page, "demo")
    send(page, QUESTION)
    wait(lambda: "Paris" in last_answer(page), 60, "an answer of the demo")
    print(f"the answer of the demo: {last_answer(page)!r}")
    page.screenshot(path=pictures / "open-webui-chat.png")
    choose(page, "scripted")
    send(page, "Count.")
    seen = set[int]()

    def grown() -> bool:
        seen.add(len(last_answer(page)))
        return len(seen) > 10

    wait(grown, 60, "an answer that grows")
    print(f"the long answer grows: {sorted(seen)} characters")
    assert running(scripted) == 1
    page.screenshot(path=pictures / "open-webui-stop.png")
    page.get_by_role("button", name="Stop").first.click()
    wait(lambda: running(scripted) == 0, 30, "the end of the answer in the server")
    text = last_answer(page)
    assert len(text) < len(LONG)
    print(f"stopped after {len(text)} of {len(LONG)} characters; the server computes nothing")


def running(url: str) -> int:
    """Requests that a server computes."""
    return len(httpx.get(f"{url}/status", trust_env=False).json()["requests"])


def main() -> int:
    """Runs it all; returns 0."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--open-webui", type=Path, required=True, help="its program")
    parser.add_argument("--work", type=Path, required=True, help="folder for models, data and logs")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of the screenshots")
    options = parser.parse_args()
    for folder in (options.work, options.pictures):
        folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    demo = f"http://127.0.0.1:{port}"
    serve = [sys.executable, "-m", "edgemoe", "serve", "--port", str(port)]
    with (
        program(serve, options.work / "serve.log"),
        scripted_server(options.work, LONG) as (scripted, _),
        open_webui(options.open_webui, options.work, [demo, scripted]) as webui,
        sync_playwright() as playwright,
    ):
        wait(lambda: answers(f"{demo}/health"), 60, "the demo's server")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*CHROMIUM])
        page = browser.new_page(viewport={"width": 1000, "height": 640})
        try:
            drive(page, webui, scripted, options.pictures)
        except BaseException:
            page.screenshot(path=options.work / "failure.png")
            raise
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
