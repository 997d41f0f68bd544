"""`edgemoe serve` as a process: its port, its signals, and its exit codes."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.machinery import ModuleSpec

import httpx
import pytest
from programs import Program, programs

from edgemoe.api.load import Loading
from edgemoe.commands import serve
from edgemoe.commands.options.serve import AddressOptions
from edgemoe.commands.served_models import ServedModel
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.machine.packages import install_extra
from edgemoe.models.heat import NAME as HEAT
from edgemoe.models.heat import load_heat, save_heat
from edgemoe.models.options.groups import Opening
from edgemoe.storage.base import ExpertKey

pytestmark = pytest.mark.e2e

ENDLESS = {"prompt": "fox", "max_tokens": 400, "stream": True, "logit_bias": {"70": 1000}}


def a_port() -> int:
    """A free port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ready(port: int) -> set[int]:
    """Waits until the server has loaded its model; returns the states of health before."""
    seen, deadline = set(), time.monotonic() + 90
    while True:
        assert time.monotonic() < deadline
        try:
            response = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except httpx.TransportError:
            time.sleep(0.02)
            continue
        if response.status_code == 200:
            return seen
        seen.add(response.status_code)
        assert response.json()["error"] | {"param": None} == {
            "message": "Loading model",
            "type": "unavailable_error",
            "code": 503,
            "param": None,
        }
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert [entry["id"] for entry in models] == ["tiny"]


def streaming(port: int, then: Callable[[], None], choices: int = 1) -> str:
    """Streams answers, calling `then` after the first piece; returns what came, also where the stream broke off."""
    came = ""
    try:
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", json=ENDLESS | {"n": choices}, timeout=60
        ) as response:
            for line in response.iter_lines():
                came += line
                if then is not None and line:
                    then()
                    then = None
    except httpx.TransportError:
        came += "broken"
    return came


def ended(program: Program) -> tuple[int, str]:
    _, err = program.communicate(timeout=60)
    return program.returncode, err


def test_the_life_of_a_server(tiny_store):
    """Its port answers while it loads; another on it, and one that does not fit, end with 2 and 3; Ctrl-C drains."""
    port, other = a_port(), a_port()
    common = ("-m", "edgemoe", "serve", "--model", tiny_store, "--name", "tiny", "--context", "512", "--port")
    with programs() as start:
        first = start(*common, port, fresh=True)  # loads for long enough to answer meanwhile
        states = ready(port)
        small = start(*common, other, "--vram-limit", "300KB")
        second = start(*common, port)
        assert ended(small)[0] == 3
        assert states == {503}
        code, err = ended(second)
        assert (code, f"expected a free port at 127.0.0.1:{port}" in err) == (2, True)
        came = streaming(port, lambda: first.send_signal(signal.SIGINT))
        assert came.endswith("data: [DONE]")
        code, err = ended(first)
        assert code == 0, err
        assert "ending after 1 request; Ctrl-C again ends at once" in err
        assert all(re.match(r"\d{4}-\d\d-\d\d [\d:]{8} edgemoe: ", each) for each in err.splitlines()), err
        line = r"edgemoe: 127.0.0.1: completion: \d+ prompt \+ 400 new tokens in [\d.]+ s, answered$"
        assert re.search(line, err, re.MULTILINE)


def test_a_server_keeps_how_hot_experts_were(damageable):
    """Its end writes the heat of its answers; the next one reads the hottest first; a damaged file is a warning."""
    port, store = a_port(), StoreModel.open(damageable)
    common = ("-m", "edgemoe", "serve", "--model", damageable, "--name", "tiny", "--context", "512", "--port")
    with programs() as start:
        one = start(*common, port)
        ready(port)
        streaming(port, lambda: one.send_signal(signal.SIGINT))
        assert ended(one)[0] == 0
        heat = load_heat(damageable, store.manifest)
        assert max(heat.values()) > 0
        hottest = ExpertKey(max(store.manifest.layers), 1)
        save_heat(damageable, store.manifest, {hottest: 1.0})
        with ExitStack() as opened:
            served = ServedModel("tiny", Loading(Opening(damageable, context=64), {"exact": 8}))
            model = served.load(opened)
            assert model.engine._keys[0] == hottest
            served.answered()
        kept = load_heat(damageable, store.manifest)
        assert kept[hottest] == 0.5  # half of what was before; no expert was used
        (damageable / HEAT).write_text("{}")
        again = start(*common, port)
        ready(port)
        again.send_signal(signal.SIGINT)
        code, err = ended(again)
        assert (code, "warm-up starts anew" in err) == (0, True)


def test_a_second_signal_ends_at_once(tiny_store):
    """Ctrl-C after SIGTERM within an answer ends it by an event that says why, with 130; the log says it too."""
    port = a_port()
    common = ("-m", "edgemoe", "serve", "--model", tiny_store, "--name", "tiny", "--context", "512", "--port")
    with programs() as start:
        one = start(*common, port)
        ready(port)

        def twice() -> None:
            one.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            one.send_signal(signal.SIGINT)

        came = streaming(port, twice, choices=8)  # one alone may end between the two signals
        assert "got the end of the server" in came
        assert "[DONE]" not in came
        assert "broken" not in came
        code, err = ended(one)
        assert code == 130, err
        assert "got the end of the server" in err
        assert "client left" not in err
        counts = re.search(r"completion: (\d+) prompt \+ (\d+) new tokens in", err)
        assert min(map(int, counts.groups())) > 0, err  # what was computed before the end
        assert "Traceback" not in err


def test_sigterm_ends_within_five_seconds(tiny_store):
    """Whatever clients do: one that reads nothing of a long answer, half a body, and a connection without a request."""
    port = a_port()
    common = ("-m", "edgemoe", "serve", "--model", tiny_store, "--name", "tiny", "--context", "512", "--port")
    long = json.dumps(ENDLESS | {"n": 64, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    sent = (head % len(long) + long, head % 1000 + b"{", b"")
    with programs() as start, ExitStack() as opened:
        one = start(*common, port)
        ready(port)
        for raw in sent:
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(raw)
        time.sleep(0.3)
        begun = time.monotonic()
        one.send_signal(signal.SIGTERM)
        code, err = ended(one)
        assert time.monotonic() - begun < 5.5  # half a second for a busy machine
        assert (code, "ending after 1 request or 3 s" in err) == (0, True), err


def test_a_missing_extra_says_what_to_install(monkeypatch, run):
    """Exit code 2 and the line that installs it."""
    find = serve.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == "uvicorn" else find(name)

    monkeypatch.setattr(serve, "find_spec", without)
    code, _, err = run("serve")
    assert (code, f"no uvicorn: run {install_extra('serve')}" in err) == (2, True)


def test_keys_from_a_file(tmp_path):
    """The first line of text, without its end; an empty or missing file, and two keys, are refused."""
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert AddressOptions(api_key_file=file).key() == "secret"
    assert AddressOptions(api_key="x").key() == "x"
    assert AddressOptions().key() is None
    with pytest.raises(UserError, match="either --api-key or"):
        AddressOptions(api_key="x", api_key_file=file).key()
    file.write_text("\n")
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(UserError, match="a key in"):
            AddressOptions(api_key_file=wrong).key()


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("a.example", None, True),
        ("0.0.0.0", "x", False),
    ],
)
def test_an_open_server_warns(host, key, warns):
    """Another address than this machine's own without a key."""
    assert ("WARNING" in (AddressOptions(host=host).warning(key) or "")) == warns
