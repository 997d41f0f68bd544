"""`edgemoe serve`: its options. Heavy imports happen inside, most of them beside the open port."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.api.load import Loading, load_model
from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import StudyOption
from edgemoe.console.durations import parse_duration
from edgemoe.console.printable import printable
from edgemoe.errors import UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.options.declared import option
from edgemoe.models.options.effects import require_several
from edgemoe.models.options.groups import PrefixCacheOptions, SharedOpening
from edgemoe.models.options.prefix_cache import require_directory
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import StepOptions
from edgemoe.models.options.study import with_studies

if TYPE_CHECKING:
    from contextlib import ExitStack

    from edgemoe.api.model import Model
    from edgemoe.serve.serving import Serving

EXAMPLES = (
    "Examples: edgemoe serve | edgemoe serve --model DIR --vram-limit 12GB --parallel 4 | edgemoe serve "
    "--prefix-cache-dir ~/kv --prefix-cache-limit 20GB | edgemoe serve --host 0.0.0.0 --api-key-file KEY "
    "| curl http://127.0.0.1:8080/v1/models"
)

PACKAGES = ("llguidance", "starlette", "uvicorn", "pydantic", "prometheus_client")
"""What edgemoe[serve] installs."""


@dataclass(frozen=True)
class AddressOptions:
    """Options of where the server listens, and who may send requests."""

    host: str = option("Address to listen at; another than 127.0.0.1 lets other machines in.", "127.0.0.1")
    port: int = option("Port to listen at; 0 for any free one.", 8080, min=0, max=65535)
    api_key: str | None = option("Key that requests must have: Authorization: Bearer KEY, or x-api-key: KEY.")
    api_key_file: Path | None = option("File with that key, which then stands in no list of processes.")
    cors: list[str] | None = option(
        "Origin of web pages on other sites that may send requests; several times."
    )
    allowed_host: list[str] | None = option(
        "Name under which the server is reached, beside localhost and addresses; several times."
    )


@dataclass(frozen=True)
class RequestOptions:
    """Options of the requests that the server takes."""

    queue: int = option(
        "Requests that may wait while others run; further ones of a client get 429 and Retry-After.", 8, min=0
    )
    request_timeout: str | None = option("Most time of one request, such as 600s. Default: no limit.")
    name: str | None = option("Name of the model for clients. Default: the last part of --model.")


@grouped
def serve_command(
    *,
    opening: SharedOpening,
    address: AddressOptions,
    requests: RequestOptions,
    disk: PrefixCacheOptions,
    chosen: StepOptions,
    study: StudyOption = None,
) -> None:
    """Serve a model over HTTP, in the interfaces of OpenAI, Anthropic and ollama (docs/serving.md).

    The port answers at once; /health turns from 503 to 200 when the model is loaded. Ctrl-C ends after the requests
    that run; a second one ends at once.
    """
    require_extra()
    key = _key(address)
    limit = None if requests.request_timeout is None else parse_duration(requests.request_timeout)
    loading = Loading(opening, with_studies(chosen, study), disk)
    _check(loading)  # rejects a wrong option before the port is opened
    from edgemoe.console.loading import starting

    with starting("loading the server"):
        from edgemoe.serve.guard import Access
        from edgemoe.serve.limits import Limits
        from edgemoe.serve.server import Address, Server
        from edgemoe.serve.serving import Serving

    listening = Address(address.host, address.port).listen()
    _warn_of_openness(address, key)
    serving = Serving(
        requests.name or _name(opening.model),
        most=opening.parallel + requests.queue,
        limits=Limits(answer_seconds=limit),
    )
    _say(f"serving {serving.name} at {_url(listening.getsockname())}/v1 (loading)")
    hosts = (address.host, *(address.allowed_host or ()))
    access = Access(hosts=hosts, origins=tuple(address.cors or ()), key=key)
    logging.getLogger("edgemoe.serve").setLevel(logging.INFO)  # one line per request
    Server(serving, access, _say).serve_model(partial(_load, serving, loading), listening)


def _check(loading: Loading) -> None:
    """Refuses wrong options, as far as they are seen without the model."""
    run = run_settings(8, **loading.settings)
    require_several(run, loading.opening.parallel, "--parallel 8")
    loading.opening.kv_format()
    require_directory(loading.disk.prefix_cache_dir, loading.disk.prefix_cache_limit)


def require_extra() -> None:
    """Refuses to serve without the packages of the extra.

    Raises:
        UserError: naming the first that is missing.
    """
    missing = next((package for package in PACKAGES if find_spec(package) is None), None)
    if missing:
        raise UserError("the packages of edgemoe[serve]", f"no {missing}", "run pip install 'edgemoe[serve]'")


def _load(serving: Serving, loading: Loading, opened: ExitStack) -> Model:
    """Opens the model, prints what it takes, and keeps how hot its experts are for the next start."""
    from edgemoe.models.heat import keeping_heat

    one = opened.enter_context(load_model(loading))
    engine, store = one.engine, one.engine.store
    for line in engine.plan.lines():
        _say(line)
    before, serving.answered = opened.enter_context(
        keeping_heat(store.directory, store.manifest, engine.heat)
    )
    engine.fill_first(before)
    return one


def _key(address: AddressOptions) -> str | None:
    if address.api_key_file is None:
        return address.api_key
    if address.api_key is not None:
        raise UserError("either --api-key or --api-key-file", "both", "leave one of the two out")
    try:
        key = address.api_key_file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"a key in {address.api_key_file}", str(error), "write one line of text") from error
    if not key:
        raise UserError(f"a key in {address.api_key_file}", "an empty file", "write one line of text")
    return key


def _name(model: Path) -> str:
    """What clients call a model: a Hub name as it is, else a path's last part."""
    return "demo" if model == DEMO else str(model) if not model.exists() else model.resolve().name


def _url(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return "http://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _warn_of_openness(address: AddressOptions, key: str | None) -> None:
    if key is None and not _is_loopback(address.host):
        _say(
            f"WARNING: --host {address.host} lets every machine that reaches this one use the model. "
            "Give --api-key-file FILE, or leave --host out."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say(line: str) -> None:
    print(printable(f"edgemoe: {line}"), file=sys.stderr, flush=True)
