"""`edgemoe serve`: its options. Heavy imports happen inside, most of them after the port is open."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from edgemoe.api.load import Loading
from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.serve import (
    AddressOptions,
    RequestOptions,
    ServedOpening,
    ServedOptions,
    url_of,
)
from edgemoe.commands.options.shared import StudyOption
from edgemoe.commands.served_models import models_by_name, served_models
from edgemoe.console.durations import parse_duration
from edgemoe.console.log_lines import log_with_time, say_with_time
from edgemoe.errors import UserError
from edgemoe.machine.packages import install_extra
from edgemoe.models.demo import DEMO
from edgemoe.models.options.effects import require_several
from edgemoe.models.options.groups import PrefixCacheOptions
from edgemoe.models.options.prefix_cache import require_directory
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import RunOptions
from edgemoe.models.options.study import with_studies

EXAMPLES = (
    "Examples: edgemoe serve | edgemoe serve --model DIR --vram-limit 12GB --parallel 4 | edgemoe serve --model qwen3 "
    "--model gpt-oss --vram-limit 12GB --idle-unload 10m | edgemoe serve "
    "--prefix-cache-dir ~/kv --prefix-cache-limit 20GB | edgemoe serve --host 0.0.0.0 --api-key-file KEY "
    "| curl http://127.0.0.1:8080/v1/models"
)

PACKAGES = ("llguidance", "starlette", "uvicorn", "pydantic", "prometheus_client")
"""Packages of the extra `serve`."""


@grouped
def serve_command(
    *,
    models: ServedOptions,
    opening: ServedOpening,
    address: AddressOptions,
    requests: RequestOptions,
    disk: PrefixCacheOptions,
    run: RunOptions,
    study: StudyOption = None,
) -> None:
    """Serve models over HTTP.

    Clients of OpenAI, Anthropic and ollama can use it (docs/serving.md), and a browser at its address. The port answers
    at once; /health turns from 503 to 200 when the model is loaded. Of several models the request's `model` chooses,
    and the limit is for all together. Ctrl-C ends after the requests that run.
    """
    require_extra()
    key, proxies = address.key(), address.proxies()
    limit = None if requests.request_timeout is None else parse_duration(requests.request_timeout)
    idle = None if requests.idle_unload is None else parse_duration(requests.idle_unload)
    named, settings = models_by_name(models.model or [DEMO], requests.name), with_studies(run, study)
    loadings = {name: Loading(replace(opening, model=model), settings, disk) for name, model in named.items()}
    _check(next(iter(loadings.values())))  # rejects a wrong option before the port is opened
    from edgemoe.console.loading import starting

    with starting("loading the server"):
        from edgemoe.serve.guard import Access
        from edgemoe.serve.limits import Limits
        from edgemoe.serve.server import Address, Server

    listening = Address(address.host, address.port).listen()
    if warning := address.warning(key):
        say_with_time(warning)
    limits = Limits(answer_seconds=limit, thinking_budget=requests.thinking_budget)
    served = served_models(loadings, opening.parallel + requests.queue, limits, idle)
    say_with_time(f"serving {', '.join(named)} at {url_of(listening.getsockname())}/v1 (loading)")
    hosts = (address.host, *(address.allowed_host or ()))
    access = Access(hosts=hosts, origins=tuple(address.cors or ()), key=key, proxies=proxies)
    log_with_time("edgemoe.serve")  # one line per request
    Server(served, access, say_with_time).serve_models(listening)


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
        raise UserError("the packages of a server", f"no {missing}", f"run {install_extra('serve')}")
