"""The endpoints of llama.cpp's router: the list of models, and orders to load and to unload one."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.serve.model_object import model_list
from edgemoe.serve.protocol.base import Endpoint, Exchange, Protocol
from edgemoe.serve.request.fields import Fields, Name


class OrderFields(Fields):
    """The body of an order."""

    model: Name


class RouterProtocol(Protocol):
    """llama.cpp's router. An order is taken at once and carried out in its turn; the list shows how far it is."""

    prefix = "/models"

    def exchanges(self) -> list[Exchange[OrderFields]]:
        """None: nothing is generated here."""
        return []

    def lookups(self) -> Mapping[tuple[str, str], Endpoint]:
        """The list, and the orders."""
        return {
            ("GET", "/models"): self._list,
            ("POST", "/models/load"): self._load,
            ("POST", "/models/unload"): self._unload,
        }

    async def _list(self, request: Request) -> Response:
        return JSONResponse(model_list(self.models.slots))

    async def _load(self, request: Request) -> Response:
        fields = await self.body_of(request, OrderFields)
        self.models.load(self.models.named(fields.model))
        return JSONResponse({"success": True})

    async def _unload(self, request: Request) -> Response:
        fields = await self.body_of(request, OrderFields)
        self.models.unload(self.models.named(fields.model))
        return JSONResponse({"success": True})
