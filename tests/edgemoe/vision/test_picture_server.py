"""A server whose model takes pictures."""

from __future__ import annotations

import pytest
from picture_models import a_picture

from edgemoe.api.pictures import picture_part

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_server_answers_a_question_about_a_picture(model):
    """As the Python API does, and its model says that it takes pictures."""
    for name in ("httpx", "starlette", "uvicorn", "pydantic", "llguidance"):
        pytest.importorskip(name)
    from servers import running

    from edgemoe.serve.models import models_of
    from edgemoe.serve.slot import Source

    messages = [{"role": "user", "content": [picture_part(a_picture(8)), {"type": "text", "text": "fox"}]}]
    with running(models_of({"tiny": Source(lambda opened: model)}, 8)) as one:
        body = {"model": "tiny", "messages": messages, "max_tokens": 4}
        answer = one.client.post("/v1/chat/completions", json=body).json()
        want = model.generate(messages)
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == want.text
        assert answer["usage"]["prompt_tokens"] == want.prompt_tokens
        for nbytes, status in ((0, 200), (64 << 20, 503)):
            one.serving.intake.pictures.nbytes = nbytes
            answer = one.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == status
        assert "pictures of at most 67108864 bytes in all requests at once" in answer.text
        text = {**body, "messages": [{"role": "user", "content": "fox"}]}
        assert one.client.post("/v1/chat/completions", json=text).status_code == 200
        shown = one.client.post("/api/show", json={"model": "tiny"}).json()
        assert shown["capabilities"] == ["completion", "vision"]
    assert one.serving.intake.pictures.nbytes == 64 << 20
    assert model.generate(messages).text == want.text
