"""The server's own endpoints that the page reads: one document, state, pictures of experts and settings."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import a_model, server_of

from edgemoe.policy.settings import RunSettings
from edgemoe.serve.errors import ApiError
from edgemoe.serve.guard import Access
from edgemoe.serve.models import models_of
from edgemoe.serve.page import document
from edgemoe.serve.page.about import about
from edgemoe.serve.page.monitor import REFRESH_SECONDS, ExpertPictures
from edgemoe.serve.page.state import serving_of_page, state
from edgemoe.serve.slot import Source
from edgemoe.storage.base import ExpertKey

KEY = "page-key"


def test_the_page_is_one_static_document():
    """It names no address to load, writes no markup of texts, and its headers allow its own style and script alone."""
    raw, headers = document.page()
    text = raw.decode()
    loaded = re.findall(r"\s(?:src|href)=\"([^\"]*)\"", text)
    assert {each for each in loaded if not each.startswith("#")} == {"data:,"}
    assert not re.search(
        r"@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
    )
    assert (text.count("<style>"), text.count("<script>"), text.count("</script>")) == (1, 1, 1)
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_every_source_is_in_the_page_and_short():
    """The folder has no other style or script, and no source has 300 lines."""
    folder = Path(document.__file__).parent
    found = {kind: {path.stem for path in folder.glob(f"*.{kind}")} for kind in ("css", "js", "html")}
    assert found == {"css": set(document.STYLES), "js": set(document.SCRIPTS), "html": {"page"}}
    lengths = {
        path.name: len(path.read_text().splitlines()) for kind in found for path in folder.glob(f"*.{kind}")
    }
    assert max(lengths.values()) < 300, lengths


@pytest.fixture(scope="module")
def keyed(tiny_store):
    """A server with a key, whose first experts are in memory."""
    with server_of(a_model(tiny_store), Access(key=KEY)) as one:
        one.serving.model.generate("the fox")
        yield one


@pytest.mark.parametrize("path", ["/status", "/monitor", "/about"])
def test_the_page_needs_no_key_and_its_figures_do(keyed, path):
    """Without the key the page comes, and its figures are 401."""
    assert keyed.client.get("/").headers["content-type"].startswith("text/html")
    assert keyed.client.get(path).status_code == 401
    assert keyed.client.get(path, headers={"x-api-key": KEY}).status_code == 200


def test_the_state_adds_up(keyed):
    """Its parts of memory are within the limit, and it names the tiers of the model."""
    found = keyed.client.get("/status", headers={"x-api-key": KEY}).json()
    assert (found["model"], found["state"], found["requests"]) == ("tiny", "ready", [])
    assert sum(found["memory"].values()) <= found["limit_bytes"]
    assert found["resident"].keys() == {"vram"}


def test_pictures_show_what_the_tiers_have(keyed):
    """Each layer's row has an expert's heat and level at its place, as the tier itself has them."""
    found = keyed.client.get("/monitor", headers={"x-api-key": KEY}).json()
    engine = keyed.serving.model.engine
    rows, heat = found["levels"]["vram"], engine.heat()
    assert (found["experts"], len(rows)) == (engine.shape.experts_per_layer, len(found["layers"]))
    assert Counter(int(digit) for digit in "".join(rows) if digit != "0") == Counter(
        engine.vram.resident().values()
    )
    for layer, row, warmth in zip(found["layers"], rows, found["heat"], strict=True):
        for expert in range(found["experts"]):
            key = ExpertKey(layer, expert)
            assert int(row[expert]) == engine.vram.level_of(key)
            byte = int(warmth[2 * expert : 2 * expert + 2], 16)
            assert byte == pytest.approx(255 * heat.get(key, 0.0), abs=1)
    assert max(warmth for row in found["heat"] for warmth in re.findall("..", row)) == "ff"


def test_pictures_are_made_rarely(keyed):
    """The tiers are read again only after REFRESH_SECONDS, however many pages are open."""
    now = [0.0]
    pictures = ExpertPictures(keyed.models, clock=lambda: now[0])
    first = pictures.answer()
    now[0] = 0.99 * REFRESH_SECONDS
    assert pictures.answer() is first
    now[0] = REFRESH_SECONDS
    assert pictures.answer() is not first
    assert pictures.answer()["layers"] == first["layers"]


def test_pictures_wait_for_the_model():
    """Before the model is open they are 503."""
    with pytest.raises(ApiError) as raised:
        ExpertPictures(models_of({"x": Source(lambda opened: None)}, 1)).answer()
    assert raised.value.status == 503


def test_an_unloaded_model_is_named():
    """Its figures come with the next request; 503 with another text than while the server starts."""
    models = models_of({"x": Source(lambda opened: None)}, 1)
    models.started = True
    with pytest.raises(ApiError, match="'x', which is unloaded: the next request") as refused:
        ExpertPictures(models).answer()
    assert (refused.value.status, refused.value.code) == (503, "model_unloaded")
    models.slots[0].state = "loading"
    with pytest.raises(ApiError, match="Loading model"):
        about(serving_of_page(models))


def test_new_tokens_are_those_of_the_model(keyed, monkeypatch):
    """Another model's answers are listed, and not counted among them."""
    progress = SimpleNamespace(
        state="decoding", prompt_tokens=4, cached_tokens=0, done_tokens=4, new_tokens=1000
    )
    job = SimpleNamespace(kind="chat", start=0.0, futures=[SimpleNamespace(progress=progress)])
    serving = SimpleNamespace(queue=SimpleNamespace(jobs=[job]))
    other = SimpleNamespace(name="other", state="unloaded", serving=serving)
    before = state(keyed.models)["new_tokens"]
    monkeypatch.setattr(keyed.models, "slots", [*keyed.models.slots, other])
    found = state(keyed.models)
    assert (found["new_tokens"], [each["new_tokens"] for each in found["requests"]]) == (before, [1000])


def test_the_description_has_every_setting(keyed):
    """It has the model's sizes, the parts of its memory as text, and the fields of its settings."""
    found = keyed.client.get("/about", headers={"x-api-key": KEY}).json()
    engine = keyed.serving.model.engine
    assert (found["model"], found["family"], found["context"]) == ("tiny", "qwen3_moe", 128)
    assert (found["experts_per_token"], found["vocabulary"]) == (engine.shape.top_k, engine.shape.vocab)
    assert found["settings"].keys() == RunSettings.__dataclass_fields__.keys()
    assert found["settings"]["levels"] == [8]
    assert all(isinstance(text, str) for part in found["plan"] for text in part)
