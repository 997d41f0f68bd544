"""The status page: nothing from elsewhere; in a browser its chat, its figures, its key, its sizes and colours."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from servers import a_model, server_of

from edgemoe.engine.text import TextStream
from edgemoe.serve.guard import Access
from edgemoe.serve.page.document import page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
KEY = "page-key"


def test_the_page_is_one_static_file():
    """It names no address, and its headers allow its own style and script alone."""
    raw, headers = page()
    text = raw.decode()
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", text) == ["data:,"]
    assert not re.search(r"https?:|@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(", text)
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_the_page_needs_no_key_and_its_figures_do(tiny_store):
    """Without the key the page comes, and /status is 401; with it the figures add up."""
    with server_of(a_model(tiny_store), Access(key=KEY)) as server:
        assert server.client.get("/").headers["content-type"].startswith("text/html")
        assert server.client.get("/status").status_code == 401
        found = server.client.get("/status", headers={"authorization": f"Bearer {KEY}"}).json()
        assert (found["model"], found["state"], found["requests"]) == ("tiny", "ready", [])
        assert sum(found["memory"].values()) <= found["limit_bytes"]
        assert found["resident"].keys() == {"vram"}


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture(scope="module")
def keyed(tiny_store) -> Iterator[object]:
    """A server with a key, whose answers are 'f' without an end."""
    model = a_model(tiny_store)
    endless = model.encode("f")[0]
    model.sampling = replace(model.sampling, logit_bias=((endless, 1000.0),))
    with server_of(model, Access(key=KEY)) as one:
        yield one


@pytest.fixture
def opened(browser, keyed) -> Iterator[object]:
    """The page at a phone's size, in the dark, with the key entered; no message on the console but refusals."""
    context = browser.new_context(viewport={"width": 320, "height": 640}, color_scheme="dark")
    tab, said = context.new_page(), []
    tab.set_default_timeout(20_000)
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(keyed.url)
    tab.get_by_text("needs the key").wait_for()
    tab.get_by_label("The server's key").fill(KEY)
    tab.get_by_text("ready", exact=True).wait_for()
    yield tab
    context.close()
    assert [line for line in said if "status of 401" not in line and "status of 400" not in line] == []


@pytest.mark.e2e
def test_a_chat_by_keyboard(opened, keyed):
    """Enter sends; the answer streams into the log; its request shows progress; Stop ends it; focus comes back."""
    keyed.serving.model.engine.watch(lambda layer, chosen: time.sleep(0.03))
    prompt = opened.get_by_label("Message")
    prompt.focus()
    opened.keyboard.type("the fox")
    opened.keyboard.press("Shift+Enter")
    opened.keyboard.type("again")
    opened.keyboard.press("Enter")
    opened.get_by_text("ffff").wait_for()
    opened.get_by_role("cell", name="answers").wait_for()
    log = opened.get_by_role("log", name="Conversation")
    assert log.get_attribute("aria-busy") == "true"
    assert log.locator("p").first.inner_text() == "the fox\nagain"
    stop = opened.get_by_role("button", name="Stop")
    stop.focus()
    opened.keyboard.press("Enter")
    opened.get_by_text("stopped").wait_for()
    keyed.wait(lambda: not keyed.serving.queue.jobs, 2)
    keyed.serving.model.engine.watch(lambda layer, chosen: None)
    assert prompt.input_value() == "the fox\nagain"
    assert opened.evaluate("document.activeElement.id") == "prompt"
    opened.get_by_text("None.").wait_for()
    opened.get_by_role("button", name="Clear").click()
    assert log.inner_text() == ""


@pytest.mark.e2e
def test_an_answer_is_text_and_an_error_an_alert(opened, keyed, monkeypatch):
    """Tags of the model stay text; a prompt beyond the context is announced, and stays in the box."""
    tag = '<img src="x" onerror="document.title=1"><b>bold</b>'
    monkeypatch.setattr(TextStream, "add", lambda self, token: tag)
    prompt = opened.get_by_label("Message")
    prompt.fill("the fox")
    opened.get_by_role("button", name="Send").click()
    opened.get_by_text("first after").wait_for()
    shown = opened.locator(".message.assistant p")
    assert shown.inner_text().startswith(tag)
    assert opened.locator(".message img, .message b").count() == 0
    assert opened.title() == "edgemoe · tiny"
    prompt.fill("fox " * 400)
    opened.get_by_role("button", name="Send").click()
    opened.get_by_role("alert").get_by_text("expected a prompt of at most").wait_for()
    assert prompt.input_value().startswith("fox fox")
    keyed.idle()


@pytest.mark.e2e
def test_the_page_fits_a_phone_and_both_schemes(opened, browser, keyed):
    """Nothing is wider than 320 pixels; text stands out from its ground in light and dark; parts have names."""
    assert opened.evaluate("document.documentElement.scrollWidth") == 320
    for name in ("Chat", "Now", "Requests", "Memory", "Experts in memory"):
        assert opened.get_by_role("region", name=name).first.is_visible()
    assert "8 bits: 16" in opened.locator("#tiers").inner_text()
    dark = opened.evaluate(CONTRAST)
    light = browser.new_page(color_scheme="light")
    light.goto(keyed.url)
    assert min(dark, light.evaluate(CONTRAST)) >= 4.5
    grounds = [tab.evaluate("getComputedStyle(document.body).backgroundColor") for tab in (opened, light)]
    assert grounds[0] != grounds[1]
    light.close()


CONTRAST = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => v / 255).map(
      (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const own = getComputedStyle(element).backgroundColor;
    return own === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : own;
  };
  const texts = document.querySelectorAll("h1, h2, dt, dd, label, summary, button:enabled, .soft, th");
  const ratios = [...texts].map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort();
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return Math.min(...ratios);
}"""
"""The least contrast of a text with its ground, as WCAG defines it."""
