"""The options of `edgemoe serve` alone."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path

from edgemoe.errors import UserError, fault_of
from edgemoe.models.demo import DEMO, demo_by_name
from edgemoe.models.options.declared import option
from edgemoe.models.options.groups import SharedOpening, complete_model


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
        "Name under which the server is reached, besides localhost and addresses; several times."
    )

    trusted_proxy: list[str] | None = option(
        "Address or network of a proxy whose X-Forwarded-For names the client, such as 127.0.0.1; several times."
    )

    def proxies(self) -> tuple[str, ...]:
        """The addresses and networks of trusted proxies.

        Raises:
            UserError: one is neither.
        """
        for each in self.trusted_proxy or ():
            try:
                ip_network(each, strict=False)
            except ValueError as error:
                action = "write an address such as 127.0.0.1, or a network such as fd00::/8"
                raise UserError("an address in --trusted-proxy", f"{each!r}", action) from error
        return tuple(self.trusted_proxy or ())

    def key(self) -> str | None:
        """The key that requests must have; None: no key.

        Raises:
            UserError: two keys are given, or one that is blank.
        """
        if self.api_key_file is None:
            if self.api_key is not None and not self.api_key.strip():
                raise UserError("a key in --api-key", "a blank one", "write one, or leave the option out")
            return self.api_key
        if self.api_key is not None:
            raise UserError("either --api-key or --api-key-file", "both", "leave one of the two out")
        try:
            key = self.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(
                f"a key in {self.api_key_file}", fault_of(error), "write one line of text"
            ) from error
        if not key:
            raise UserError(f"a key in {self.api_key_file}", "an empty file", "write one line of text")
        return key

    def warning(self, key: str | None) -> str | None:
        """A warning where other machines may use the model without a key; None elsewhere."""
        if key is not None or _is_loopback(self.host):
            return None
        return (
            f"WARNING: --host {self.host} lets every machine that reaches this one use the model. "
            "Give --api-key-file FILE, or leave --host out."
        )


@dataclass(frozen=True)
class ServedOptions:
    """The option that names the models."""

    model: list[Path] | None = option(
        "A model, as `edgemoe chat` takes it, or a directory of stores; several times for several models, of which a "
        "request's `model` chooses. The first one is loaded at the start. Default: demo, the small model that comes "
        "with edgemoe.",
        short="-m",
        callback=lambda models: [demo_by_name(each) for each in models or ()],
        autocompletion=complete_model,
    )


@dataclass(frozen=True)
class ServedOpening(SharedOpening):
    """An opening of one of the models, which ServedOptions names."""

    model: Path = DEMO


@dataclass(frozen=True)
class RequestOptions:
    """Options of the requests that the server takes."""

    queue: int = option(
        "Requests that may wait while others run; further ones of a client get 429 and Retry-After.", 8, min=0
    )
    request_timeout: str | None = option("Most time of one request, such as 600s. Default: no limit.")
    thinking_budget: int | None = option(
        "Most tokens of reasoning for requests that say nothing of it; 0: no reasoning. Default: no limit.",
        min=0,
    )
    name: str | None = option("Name of the model for clients. Default: the last part of --model.")
    idle_unload: str | None = option(
        "Time after its last request in which a model is unloaded, such as 10m; the next request loads it again. A "
        "request's keep_alive goes before it. Default: a model stays until another one needs its memory."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(name: tuple[str, int]) -> str:
    """The address of a socket as a URL."""
    host, port = name[:2]
    return "http://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
