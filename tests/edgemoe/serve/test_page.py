"""The page in Chromium: its chat, its monitor, its sizes, colours and names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from browsers import chromium
from scripted import chatml_model, script
from servers import server_of

from edgemoe.serve.guard import Access

KEY = "page-key"

HOSTILE = """<think>
plan <b>x</b>
</think>

<img src=x onerror="document.title='taken'"> <b>bold</b>

[click](javascript:alert(1)) ![p](https://example.com/p.png) **strong**

```html
<script>document.title = 'taken'</script>"""
"""An answer with reasoning, markup, an address that is none of a link, a picture, and code that does not end."""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def keyed(tiny_store) -> Iterator[object]:
    """A server with a key and a context of 384 tokens, for answers by a script."""
    model = chatml_model(tiny_store, context=384, parallel=1)
    model.sampling = replace(model.sampling, max_new_tokens=1000)
    with server_of(model, Access(key=KEY)) as one:
        yield one


@pytest.fixture
def opened(browser, keyed) -> Iterator[object]:
    """The page at a phone's size, in the dark, with the key; the console has no message but refusals."""
    context = browser.new_context(viewport={"width": 320, "height": 640}, color_scheme="dark")
    context.set_default_timeout(20_000)
    tab, said = context.new_page(), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(keyed.url)
    tab.get_by_text("needs the key").wait_for()
    tab.get_by_label("The server's key").fill(KEY)
    tab.get_by_text("ready", exact=True).wait_for()
    yield tab
    context.close()
    keyed.idle()
    assert [line for line in said if "status of 40" not in line] == []


@pytest.fixture
def says(keyed, monkeypatch):
    """Sets the answers: a text, or a function of the prompt's text; returns the prompts so far."""
    return lambda answers: script(monkeypatch, keyed.serving.model.tokenizer, answers)


def send(tab, text: str) -> None:
    """Sends a message, and waits for its answer's cost."""
    before = tab.get_by_text("first after").count()
    tab.get_by_label("Message").fill(text)
    tab.keyboard.press("Enter")
    tab.get_by_text("first after").nth(before).wait_for()


def bodies(tab) -> list[str]:
    """The texts of the conversation."""
    return tab.locator("#log .message .body").all_inner_texts()


@pytest.mark.e2e
def test_a_chat_by_keyboard(opened, keyed, says):
    """Enter sends; the answer streams into the log; the monitor shows it; Escape stops it, and what came stays."""
    says("f" * 300)
    steps = threading.Semaphore(60)
    keyed.serving.model.engine.watch(lambda layer, chosen: steps.acquire(timeout=20))
    prompt, log = opened.get_by_label("Message"), opened.get_by_role("log", name="Conversation")
    prompt.focus()
    opened.keyboard.type("the fox")
    opened.keyboard.press("Shift+Enter")
    opened.keyboard.type("again")
    opened.keyboard.press("Enter")
    log.get_by_text("ffff").wait_for()
    assert log.get_attribute("aria-busy") == "true"
    opened.get_by_role("link", name="Monitor").click()
    opened.get_by_role("cell", name="answers").wait_for()
    opened.get_by_role("link", name="Chat", exact=True).click()
    opened.keyboard.press("Escape")
    log.get_by_text("stopped").wait_for()
    steps.release(10_000)
    keyed.idle()
    keyed.serving.model.engine.watch(lambda layer, chosen: None)
    question, answer = bodies(opened)
    assert question == "the fox\nagain"
    assert set(answer) == {"f"}
    assert log.get_attribute("aria-busy") == "false"
    assert opened.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.e2e
def test_an_answer_is_markdown_and_never_markup(opened, says):
    """Reasoning is folded; tags of the model are text; only http links are links; the cost has bits and bytes."""
    says(HOSTILE)
    send(opened, "the fox")
    answer = opened.locator(".message.assistant")
    assert answer.locator("img, b, script").count() == 0
    assert opened.title() == "edgemoe · tiny"
    assert "<img src=x onerror=\"document.title='taken'\"> <b>bold</b>" in answer.inner_text()
    assert "<script>" in answer.locator("pre").inner_text()
    assert answer.locator(".body strong").inner_text() == "strong"
    assert [link.get_attribute("href") for link in answer.locator("a").all()] == ["https://example.com/p.png"]
    thought = answer.locator("details.thought")
    assert not thought.locator("div").is_visible()
    thought.get_by_text("Thought for").click()
    assert "plan <b>x</b>" in thought.locator("div").inner_text()
    cost = answer.locator(".cost summary").inner_text()
    assert "tokens/s" in cost
    assert "bits per weight" in cost
    answer.locator(".cost summary").click()
    assert "read from disk" in answer.locator(".cost dl").inner_text()


MARKDOWN = {
    "a *b* **c** ~~d~~ `e*f*`": "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e*f*</code></p>",
    "2 * 3 * 4, snake_case_name and 5*3": "<p>2 * 3 * 4, snake_case_name and 5*3</p>",
    "***both*** \\*no\\*": "<p><strong><em>both</em></strong> *no*</p>",
    "# One\ntwo\n\n---": "<h1>One</h1><p>two</p><hr>",
    "- a\n- b\n  1. c\n  2. d\n- [x] e": "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li>"
    '<li class="task">☑ e</li></ul>',
    "3. a\n\n   b": '<ol start="3"><li>a<p>b</p></li></ol>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\nb": "<p>a<br>b</p>",
    "&amp; <b>x</b>": "<p>&amp;amp; &lt;b&gt;x&lt;/b&gt;</p>",
    "[a](JaVaScRiPt:alert(1)) [b](data:text/html,x)": "<p><span>a</span> <span>b</span></p>",
    "see https://a.b/c_d_e.": '<p>see <a href="https://a.b/c_d_e" target="_blank" rel="noopener noreferrer nofollow">'
    "https://a.b/c_d_e</a>.</p>",
    '[q](https://a.b/"onclick="x)': '<p><a href="https://a.b/&quot;onclick=&quot;x" target="_blank" '
    'rel="noopener noreferrer nofollow">q</a></p>',
    "| a | b |\n|--|-:|\n| <i> | 2 |": '<div class="cells"><table>'
    '<thead><tr><th>a</th><th style="text-align: right;">b</th>'
    '</tr></thead><tbody><tr><td>&lt;i&gt;</td><td style="text-align: right;">2</td></tr></tbody></table></div>',
    "````\n```\n</code><img>\n````": '<div class="code">'
    '<div class="bar"><span>code</span><button class="quiet" type="button">'
    'Copy</button></div><pre tabindex="0"><code>```\n&lt;/code&gt;&lt;img&gt;</code></pre></div>',
}
"""Text -> its elements."""

SHOW = """([text, cuts]) => {
  const target = document.createElement("div"), markdown = new Markdown(target);
  for (const cut of cuts) markdown.update(text.slice(0, cut), true);
  markdown.update(text);
  return target.innerHTML;
}"""
"""Shows a text as it grows to some lengths, then all of it; returns its elements."""

OPEN = """(text) => {
  const target = document.createElement("div");
  new Markdown(target).update(text, true);
  return target.innerHTML;
}"""
"""Shows a text that is not complete yet; returns its elements."""

ELEMENTS = """(texts) => {
  const target = document.createElement("div"), seen = new Set(), started = performance.now();
  for (const text of texts) {
    new Markdown(target).update(text, true);
    for (const element of target.querySelectorAll("*")) {
      seen.add([element.tagName, ...element.getAttributeNames()].join(" "));
    }
    if (target.textContent.length > 2 * text.length + 100) throw new Error("more text than was written");
    target.replaceChildren();
  }
  return [...seen];
}"""
"""Shows texts that end in the middle; returns the names of elements with the names of their attributes."""


@pytest.mark.e2e
def test_markdown_becomes_elements(opened):
    """Each form has its elements, the same in one piece and as it grows; open marks count as closed while it does."""
    for text, elements in MARKDOWN.items():
        assert opened.evaluate(SHOW, [text, []]) == elements
        assert opened.evaluate(SHOW, [text, [*range(len(text))]]) == elements
    for text, elements in {
        "a **b": "<p>a <strong>b</strong></p>",
        "a `b": "<p>a <code>b</code></p>",
        "a [b](https://c.d/e": "<p>a b</p>",
    }.items():
        assert opened.evaluate(OPEN, text) == elements


@pytest.mark.e2e
def test_hostile_markdown_stays_text(opened):
    """Tags, handlers and deep nesting of any kind, cut anywhere, make none but the renderer's own elements."""
    tags = (
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg/onload=alert(1)>",
        "</p><iframe>",
    )
    forms = (
        "{}",
        "`{}",
        "**{}",
        "[{}](https://a.b/{})",
        "![{}]({})",
        "> {}",
        "- {}",
        "|{}|\n|-|\n|{}|",
        "```{}\n{}",
    )
    texts = [form.replace("{}", tag) for form in forms for tag in tags]
    texts += [
        mark * 3000 for mark in (">", "- ", "*", "_a", "`", "[", "![", "**a", "|", "#", "1. ", "[a](", "\\")
    ]
    texts += [
        "".join(" " * i + "- a\n" for i in range(300)),
        "a" * 40_000,
        "* " * 10_000 + "x",
        " " * 20_000 + "x",
    ]
    allowed = {
        *(
            "P",
            "BR",
            "STRONG",
            "EM",
            "DEL",
            "CODE",
            "SPAN",
            "HR",
            "LI",
            "UL",
            "OL",
            "BLOCKQUOTE",
            "H1",
            "OL start",
        ),
        *(
            "A href target rel",
            "DIV class",
            "BUTTON type class",
            "BUTTON class type",
            "PRE tabindex",
            "TABLE",
            "THEAD",
        ),
        *("TBODY", "TR", "TH", "TD"),
    }
    assert set(opened.evaluate(ELEMENTS, texts)) <= allowed


@pytest.mark.e2e
def test_conversations_outlive_a_reload(opened, says):
    """Answers are replaced by Regenerate, questions by Edit; a reload keeps all; a second conversation is separate."""
    prompts = says(lambda prompt: f"answer {prompt.count('<|im_start|>')}.{len(prompts)}")
    send(opened, "one")
    send(opened, "two")
    first = bodies(opened)
    opened.get_by_role("button", name="Regenerate").click()
    opened.locator("#log .body").last.get_by_text("answer 4.3").wait_for()
    opened.get_by_text("first after").nth(1).wait_for()
    assert bodies(opened)[:3] == first[:3]
    prompt = opened.get_by_label("Message")
    opened.keyboard.press("ArrowUp")
    assert prompt.input_value() == "two"
    opened.get_by_role("button", name="Edit").first.click()
    send_edited(opened, "three")
    assert bodies(opened) == ["three", "answer 2.4"]
    opened.reload()
    opened.get_by_text("answer 2.4").wait_for()
    opened.get_by_text("ready", exact=True).wait_for()
    opened.get_by_role("button", name="Conversations").click()
    opened.get_by_role("button", name="New conversation").click()
    opened.get_by_text("begin with an example").wait_for()
    opened.get_by_role("button", name="What is the capital of France?").click()
    opened.get_by_text("answer 2.5").wait_for()
    opened.get_by_text("first after").wait_for()
    opened.get_by_role("button", name="Conversations").click()
    opened.get_by_role("button", name="three", exact=True).click()
    opened.get_by_text("answer 2.4").wait_for()
    opened.get_by_role("button", name="Conversations").click()
    opened.get_by_role("button", name="Delete three").click()
    opened.get_by_text("answer 2.5").wait_for()
    assert opened.evaluate("Object.keys(localStorage).filter((key) => key.includes('chat')).length") == 1


def send_edited(tab, text: str) -> None:
    """Sends a message in place of another one."""
    tab.get_by_label("Message").fill(text)
    tab.keyboard.press("Enter")
    tab.locator("#log .body").first.get_by_text(text).wait_for()
    tab.get_by_text("first after").wait_for()


@pytest.mark.e2e
def test_a_full_context_drops_the_oldest_turns(opened, says):
    """The oldest turns leave the prompt, the page says so and goes on; one question beyond the context is an alert."""
    prompts = says("yes")
    for letter in "abc":
        send(opened, letter * 60)
    assert opened.get_by_text("The context is full").count() == 0
    send(opened, "d" * 60)
    note = opened.get_by_text("The context is full: the oldest 4 messages left it.")
    assert note.count() == 1
    assert "b" * 60 not in prompts[-1]
    assert "c" * 60 in prompts[-1]
    assert len(bodies(opened)) == 8
    send(opened, "e")
    assert note.count() == 1
    opened.get_by_label("Message").fill("fox " * 200)
    opened.keyboard.press("Enter")
    opened.get_by_role("alert").get_by_text("use a larger context or a shorter prompt").wait_for()
    assert opened.get_by_label("Message").input_value().startswith("fox fox")
    assert len(bodies(opened)) == 10


@pytest.mark.e2e
def test_settings_and_the_model_go_with_a_request(opened, says):
    """A system prompt and numbers are in the request, after a reload too; several models are a choice."""
    names = [{"id": "tiny"}, {"id": "other"}]
    opened.route("**/v1/models", lambda route: route.fulfill(json={"data": names}))
    prompts = says("yes")
    opened.get_by_role("button", name="Settings").click()
    opened.get_by_label("System prompt").fill("Be brief.")
    opened.get_by_label("Temperature").fill("0.5")
    opened.get_by_label("Most tokens of thinking").fill("7")
    opened.get_by_label("Colours").select_option("light")
    opened.get_by_role("button", name="Close").click()
    opened.reload()
    opened.get_by_role("combobox", name="Model").select_option("other")
    with opened.expect_request("**/v1/chat/completions") as sent:
        send(opened, "hello")
    body = sent.value.post_data_json
    assert (body["model"], body["temperature"], body["thinking_budget"]) == ("other", 0.5, 7)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "Be brief." in prompts[-1]
    assert opened.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    opened.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    send(opened, "and now")
    opened.get_by_role("alert").get_by_text("This browser has no room").wait_for()


@pytest.mark.e2e
def test_the_monitor_and_the_description(opened):
    """Each chart says its figures, the picture of experts is read by arrow keys, and clients have addresses."""
    opened.get_by_role("link", name="Monitor").click()
    picture = opened.get_by_role("img", name="experts; ")
    picture.wait_for()
    names = [chart.get_attribute("aria-label") for chart in opened.locator("svg.chart").all()]
    assert len(names) == 6
    assert any("limit: " in name for name in names)
    picture.focus()
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowRight")
    assert opened.locator("#heat-cell").inner_text().endswith(" bits in VRAM.")
    opened.get_by_label("The picture shows").select_option("bits in VRAM")
    opened.get_by_role("img", name="at 8 bits").wait_for()
    one = {"layers": [0], "experts": 2, "heat": ["ff00"], "levels": {"vram": ["80"], "dram": ["04"]}}
    opened.route("**/monitor", lambda route: route.fulfill(json=one))
    opened.get_by_role("img", name="1 layer of 2 experts: 1 at 8 bits, 1 absent.").wait_for()
    opened.get_by_label("The picture shows").select_option("bits in DRAM")
    opened.get_by_role("img", name="1 layer of 2 experts: 1 at 4 bits, 1 absent.").wait_for()
    for name in ("Now", "Requests", "Memory", "Experts in memory", "Queue", "Experts by layer"):
        assert opened.get_by_role("region", name=name, exact=True).first.is_visible()
    opened.get_by_role("link", name="About").click()
    opened.get_by_text("qwen3_moe").wait_for()
    assert f"{opened.evaluate('location.origin')}/v1" in opened.locator("#clients").inner_text()


RATES = """() => {
  const one = { model: "a", new_tokens: 10, ssd_bytes: 0, dram_bytes: 0, expert_requests: 0, memory: {}, resident: {} };
  record(one);
  before.now -= 10;
  const later = record({ ...one, new_tokens: 30 }), other = record({ ...one, model: "b", new_tokens: 500 });
  const rates = [later.tokens > 0, other.tokens, samples.length];
  before = null;
  samples.length = 0;
  return rates;
}"""
"""Records two states of a model and one of another model."""


@pytest.mark.e2e
def test_rates_begin_again_with_another_model(opened):
    """Its counters are not compared with the first model's, and its charts have nothing of them."""
    assert opened.evaluate(RATES) == [True, None, 1]


@pytest.mark.e2e
def test_the_page_fits_a_phone_and_both_schemes(opened, browser, keyed, says):
    """Nothing is wider than 320 pixels; text stands out from its ground in light and dark, in each view."""
    says("| a | b |\n|---|---|\n| long " + "x" * 90 + " | `code` |")
    send(opened, "the fox")
    light = browser.new_page(color_scheme="light")
    light.goto(keyed.url)
    for view in ("chat", "monitor", "about"):
        for tab in (opened, light):
            tab.evaluate(f"location.hash = '#{view}'")
            tab.locator(f"#{view}").wait_for()
        assert opened.evaluate("document.documentElement.scrollWidth") == 320
        assert opened.evaluate(f"document.getElementById('{view}').scrollWidth") <= 320
        assert min(opened.evaluate(CONTRAST), light.evaluate(CONTRAST)) >= 4.5, view
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
  const kinds = "h1, h2, h3, dt, dd, label, summary, button:enabled, .soft, th, td, a, .body, .note";
  const ratios = [...document.querySelectorAll(kinds)].filter((e) => e.checkVisibility()).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort();
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return Math.min(...ratios);
}"""
"""The least contrast of a text with its ground, as WCAG defines it."""
