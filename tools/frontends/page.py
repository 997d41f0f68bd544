"""Takes pictures of the server's page in headless Chromium.

    python -m tools.frontends.page --work DIR --pictures docs/frontends

The chat's answers are a script's, so that they show reasoning, code and a table; the scripted model does not see the
picture of a question. The monitor shows the demo under a limit that holds a part of its experts, while it
answers. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tools.frontends.open_webui import CHROMIUM, answers, free_port, program, wait
from tools.frontends.scripted import scripted_server

LIMIT = "34MB"
"""Less than the demo's experts need at 8 bits."""

SAMPLES = 25
"""Seconds of the monitor's charts."""

MOST_BYTES = 120_000
"""Most bytes of a picture."""

ABOUT_PICTURE = "Which layers use few experts?"

SEEN = "Layers 0 and 1: most of their tokens go to a few experts, which are the bright cells of their rows."

QUESTION = "How much faster is DRAM than an SSD?"

ANSWER = """<think>
The user compares two kinds of memory. Bandwidth is what matters for experts: a table, and the sum for one expert.
</think>

For the experts of a model, **bandwidth** decides:

| memory | bytes per second | one expert of 4.7 MB |
|:---|---:|---:|
| SSD (NVMe) | 3 GB/s | 1.6 ms |
| DRAM | 30 GB/s | 0.16 ms |

```python
def seconds(expert_bytes: float, bytes_per_second: float) -> float:
    return expert_bytes / bytes_per_second
```

1. Experts that are used *often* stay in memory.
2. The others are read while the token before is computed."""


def answer(prompt: str) -> str:
    """The script: an answer to each of the two questions."""
    return SEEN if ABOUT_PICTURE in prompt else ANSWER


@contextmanager
def demo_server(work: Path) -> Iterator[str]:
    """Serves the demo under LIMIT inside the block; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "edgemoe", "serve", "--vram-limit", LIMIT, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with program(command, work / "serve.log"):
        wait(lambda: answers(f"{url}/health"), 180, "the demo's server")
        yield url


def opened(browser: Any, url: str, width: int, height: int, scheme: str) -> Any:
    """A tab with the page of a size and a colour scheme, once the server is ready."""
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.goto(url)
    tab.get_by_text("ready", exact=True).wait_for()
    return tab


def save(part: Any, path: Path) -> None:
    """Writes a picture of a tab, or of an element of it.

    Raises:
        ValueError: it is larger than MOST_BYTES.
    """
    part.screenshot(path=path)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"expected a picture of at most {MOST_BYTES} bytes, got {path}: make it smaller")
    print(f"{path}: {path.stat().st_size} bytes")


def picture_chat(browser: Any, url: str, pictures: Path) -> None:
    """A chat in light, and the same on a phone in dark."""
    for name, width, height, scheme in (("light", 1080, 880, "light"), ("narrow", 390, 780, "dark")):
        tab = opened(browser, url, width, height, scheme)
        tab.get_by_label("Message").fill(QUESTION)
        tab.keyboard.press("Enter")
        tab.get_by_text("first after").wait_for()
        if name == "light":
            tab.locator(".thought summary").click()
            tab.locator("#log").evaluate("log => log.scrollTop = 0")
        save(tab, pictures / f"page-chat-{name}.png")
        tab.close()


def picture_attached(browser: Any, url: str, pictures: Path) -> None:
    """A chat about a picture, on a phone in light, with the picture of a further question in the message box."""
    tab = opened(browser, url, 390, 780, "light")
    seeing = {"id": "scripted", "architecture": {"input_modalities": ["text", "image"]}}
    tab.route("**/v1/models", lambda route: route.fulfill(json={"data": [seeing]}))
    for path in ("**/tokenize", "**/v1/chat/completions"):
        tab.route(path, without_pictures)
    tab.evaluate("readModels()")
    file = pictures / "page-experts-dark.png"
    for question in (ABOUT_PICTURE, "And here?"):
        tab.locator("#files").set_input_files(file)
        tab.get_by_text("1 picture will go with the message.").wait_for()
        tab.get_by_label("Message").fill(question)
        if question == ABOUT_PICTURE:
            tab.keyboard.press("Enter")
            tab.get_by_text("first after").wait_for()
    save(tab, pictures / "page-chat-picture.png")
    tab.close()


def without_pictures(route: Any) -> None:
    """Sends a request on with the text of its messages alone: the scripted model has no vision tower."""
    body = route.request.post_data_json
    for message in body["messages"]:
        if isinstance(message["content"], list):
            message["content"] = "".join(part.get("text", "") for part in message["content"])
    route.continue_(post_data=body)


def picture_monitor(browser: Any, url: str, pictures: Path) -> None:
    """The monitor in dark, while the demo answers."""
    ended = threading.Event()

    def ask() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            body = {"prompt": f"{number}. It was a dark night, and", "max_tokens": 150, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)

    asking = threading.Thread(target=ask)
    tab = opened(browser, f"{url}/#monitor", 1080, 900, "dark")
    asking.start()
    try:
        wait(lambda: tab.evaluate("pictures ? samples.length : 0") >= SAMPLES, 120, "charts with samples")
        save(tab, pictures / "page-monitor-dark.png")
        save(tab.get_by_role("region", name="Experts by layer"), pictures / "page-experts-dark.png")
    finally:
        ended.set()
        asking.join()
        tab.close()


def main() -> int:
    """Takes all pictures; returns 0."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of the pictures")
    options = parser.parse_args()
    for folder in (options.work, options.pictures):
        folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*CHROMIUM])
        try:
            with demo_server(options.work) as url:
                picture_monitor(browser, url, options.pictures)
            with scripted_server(options.work, answer) as (url, _):
                picture_chat(browser, url, options.pictures)
                picture_attached(browser, url, options.pictures)
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
