"""Pictures on the server's page, in Chromium: how they are attached, sent and kept."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from browsers import chromium
from picture_models import TEMPLATE, a_picture, a_plain_picture
from PIL import Image
from small_tokenizer import SPECIAL

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

GIVE = """([kind, target, base64]) => {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)), data = new DataTransfer();
  data.items.add(new File([bytes], "given.png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, cancelable: true, bubbles: true })
    : new DragEvent(kind, { dataTransfer: data, cancelable: true, bubbles: true });
  document.querySelector(target).dispatchEvent(event);
  return event.defaultPrevented;
}"""
"""Pastes or drops a file; returns whether the page has taken it."""

RESTORE = """async () => {
  const one = newConversation(), file = { id: "a", bytes: 1, width: 1, height: 1 };
  const whole = [{ role: "user", content: "", files: [file] }];
  urls.set("a", "data:image/png;base64,AAAA");
  one.messages = whole;
  await savePictures(one);
  one.messages = [];
  const first = savePictures(one);
  one.messages = whole;
  await Promise.all([first, savePictures(one)]);
  return (await keptKeys()).length;
}"""
"""Takes a picture out of a conversation, and puts it back before that is written; returns how many are kept."""


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    """The address of a server whose model takes pictures."""
    for name in ("httpx", "starlette", "uvicorn", "pydantic", "llguidance"):
        pytest.importorskip(name)
    from servers import running

    from edgemoe.serve.models import models_of
    from edgemoe.serve.slot import Source

    model.tokenizer.chat_template = TEMPLATE.replace(
        SPECIAL[1], f"{SPECIAL[1]} "
    )  # pictures apart, as models have them
    with running(models_of({"tiny": Source(lambda opened: model)}, 8)) as one:
        yield one.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture
def tab(browser, url) -> Iterator[Any]:
    """The page at a phone's size, with short answers, once the model is ready; no script fails."""
    context = browser.new_context(viewport={"width": 320, "height": 640})
    context.set_default_timeout(60_000)
    context.add_init_script("localStorage['edgemoe:settings'] = JSON.stringify({ max_tokens: '4' })")
    tab, said = context.new_page(), []
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(url)
    tab.get_by_role("button", name="Add pictures").wait_for()
    yield tab
    context.close()
    assert said == []


def attach(tab: Any, *files: bytes) -> None:
    """Chooses files by the button, and waits for their pictures."""
    payload = [{"name": "one.png", "mimeType": "image/png", "buffer": file} for file in files]
    before = tab.locator("#attached img").count()
    with tab.expect_file_chooser() as opened:
        tab.get_by_role("button", name="Add pictures").click()
    opened.value.set_files(payload)
    tab.locator("#attached img").nth(before + len(files) - 1).wait_for()


def give(tab: Any, kind: str, target: str, file: bytes) -> bool:
    return bool(tab.evaluate(GIVE, [kind, target, base64.b64encode(file).decode()]))


def ask(tab: Any, text: str) -> Any:
    """Sends the message, waits for its answer; returns the content of the request's last message."""
    before = tab.get_by_text("first after").count()
    tab.get_by_label("Message").fill(text)
    with tab.expect_request("**/v1/chat/completions") as request:
        tab.keyboard.press("Enter")
    tab.get_by_text("first after").nth(before).wait_for()
    return request.value.post_data_json["messages"][-1]["content"]


def files_of(content: Any) -> list[bytes]:
    """The bytes of a content's pictures."""
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def test_pictures_come_by_button_paste_and_drop(tab, model):
    """Each has a thumbnail with a name; a removed one is not sent; a reload keeps what was; Delete removes it."""
    one, two, three = a_picture(1), a_picture(2, 40, 40), a_picture(3, 40, 40)
    attach(tab, one)
    assert give(tab, "paste", "#prompt", two)
    tab.locator("#attached img").nth(1).wait_for()
    assert give(tab, "drop", "#log", three)
    tab.get_by_text("3 pictures will go with the message.").wait_for()
    assert tab.get_by_alt_text("Picture 1, 90 × 70").is_visible()
    tab.get_by_role("button", name="Remove picture 2").press("Enter")
    tab.get_by_text("2 pictures will go with the message.").wait_for()
    assert tab.evaluate("document.activeElement.ariaLabel") == "Remove picture 2"
    assert tab.evaluate("document.documentElement.scrollWidth") == 320
    content = ask(tab, "fox")
    assert files_of(content) == [one, three]
    assert content[-1] == {"type": "text", "text": "fox"}
    parts = [{"type": "image", "image": file} for file in (one, three)]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "fox"}]}]
    assert f"{model.generate(prompt).prompt_tokens} tokens" in tab.locator(".cost dl").text_content()
    assert tab.locator("#attached img").count() == 0
    tab.reload()
    shown = tab.get_by_alt_text("Picture 2 of 2, 40 × 40")
    shown.wait_for()
    tab.wait_for_function("document.querySelector('.pictures img').src.startsWith('data:image/png')")
    tab.get_by_role("button", name="Add pictures").wait_for()
    tab.get_by_role("button", name="Edit").click()
    tab.locator("#attached img").nth(1).wait_for()
    tab.get_by_role("button", name="Remove picture 1").click()
    tab.get_by_label("Message").fill("")
    with tab.expect_request("**/v1/chat/completions") as request:
        tab.get_by_role("button", name="Send").click()
    assert files_of(request.value.post_data_json["messages"][-1]["content"]) == [three]
    tab.get_by_text("first after").wait_for()
    tab.wait_for_function("keptKeys().then((keys) => keys.length === 1)")
    tab.get_by_role("button", name="Conversations").click()
    tab.get_by_role("button", name="Delete A picture").click()
    tab.wait_for_function("keptKeys().then((keys) => keys.length === 0)")


def test_large_pictures_are_made_smaller(tab):
    """In pixels, or in bytes; a file that is no picture and a sixth one are alerts."""
    for picture, form, size in (
        (a_plain_picture(1300, 900), "PNG", (1230, 852)),
        (a_picture(4, 600, 560), "JPEG", (600, 560)),
    ):
        attach(tab, picture)
        (file,) = files_of(ask(tab, "fox"))
        with Image.open(BytesIO(file)) as found:
            assert (found.format, found.size) == (form, size)
        assert len(file) <= 1_000_000
    assert give(tab, "drop", "#log", b"text")
    tab.get_by_role("alert").get_by_text("given.png is no picture that this browser can read.").wait_for()
    attach(tab, *[a_picture(5, 32, 32)] * 5)
    give(tab, "drop", "#log", a_picture(6, 32, 32))
    tab.get_by_role("alert").get_by_text("A message has at most 5 pictures").wait_for()
    assert tab.locator("#attached img").count() == 5


def test_a_full_browser_says_so(tab):
    """Where a picture cannot be kept it is sent all the same, and a reload shows that it is gone."""
    tab.evaluate("() => { IDBObjectStore.prototype.put = () => { throw new Error('full'); }; }")
    attach(tab, a_picture(7, 40, 40))
    assert len(files_of(ask(tab, "fox"))) == 1
    tab.get_by_role("alert").get_by_text("This browser has no room for the pictures").wait_for()
    tab.reload()
    tab.get_by_text("A picture that this browser no longer has").wait_for()
    tab.get_by_text("ready", exact=True).wait_for()
    assert ask(tab, "dog") == "dog"


def test_a_model_without_a_vision_tower_gets_text(tab):
    """Its page has no button, says so of a drop, and leaves earlier pictures out of the prompt with a note."""
    attach(tab, a_picture(8, 40, 40))
    ask(tab, "fox")
    blind = {"id": "tiny", "architecture": {"input_modalities": ["text"]}}
    tab.route("**/v1/models", lambda route: route.fulfill(json={"data": [blind]}))
    tab.reload()
    tab.get_by_text("ready", exact=True).wait_for()
    assert not tab.get_by_role("button", name="Add pictures").is_visible()
    assert give(tab, "drop", "#log", a_picture(9))
    tab.get_by_role("alert").get_by_text("This model takes no pictures.").wait_for()
    with tab.expect_request("**/v1/chat/completions") as request:
        assert ask(tab, "dog") == "dog"
    contents = [each["content"] for each in request.value.post_data_json["messages"]]
    assert contents == ["fox", contents[1], "dog"]
    tab.get_by_text("1 picture of the conversation is not in its prompt").wait_for()


def test_a_model_that_is_not_loaded_yet_gets_the_pictures(tab):
    """The page waits for the model, and does not say that it takes none."""
    picture, counted = a_picture(10, 40, 40), list[str]()
    attach(tab, picture)
    ask(tab, "fox")

    def models(route: Any) -> None:
        route.continue_() if counted else route.fulfill(json={"data": [{"id": "tiny"}]})

    def count(route: Any) -> None:
        counted.append(route.request.url)
        route.continue_()

    tab.route("**/v1/models", models)
    tab.route("**/tokenize", count)
    tab.reload()
    tab.get_by_text("ready", exact=True).wait_for()
    with tab.expect_request("**/v1/chat/completions") as request:
        ask(tab, "dog")
    assert files_of(request.value.post_data_json["messages"][0]["content"]) == [picture]
    assert "takes no pictures" not in tab.locator("#log").text_content()


def test_pictures_of_a_question_that_failed_are_kept(tab):
    """A changed question that has no answer is as it was before, and so are its pictures."""
    assert tab.evaluate(RESTORE) == 1


def test_damaged_conversations_are_left_out(tab):
    """A message whose pictures are none does not keep the page from its start."""
    messages = [{"role": "user", "content": "fox", "files": None}]
    broken = [
        {"id": "x", "left": 0, "title": "x", "messages": messages},
        {"id": "y", "messages": [{**messages[0], "files": [None]}]},
    ]
    tab.evaluate(
        "(all) => { for (const one of all) localStorage['edgemoe:chat:' + one.id] = JSON.stringify(one); }",
        broken,
    )
    tab.reload()
    tab.get_by_text("ready", exact=True).wait_for()
