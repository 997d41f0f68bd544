"""Errors of requests: a status of HTTP, and what a protocol's error object says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from edgemoe.errors import ContextExceeded, DamagedData, DoesNotFit, EdgemoeError, TemplateFailed, UserError

INVALID, UNAVAILABLE, FAILED = "invalid_request_error", "unavailable_error", "server_error"
"""Types of errors: of the request, of this moment, of the model or the machine."""

_LOG = "the server's log has the rest"


class ApiError(Exception):
    """A request that is answered by an error.

    Args:
        status: HTTP's status code.
        message: text for people.
        kind: INVALID, UNAVAILABLE or FAILED.
        param: the field at fault.
        code: a name for programs.
        headers: the headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.kind, self.param, self.code = kind, param, code

    def response(self, body: Mapping[str, Any]) -> JSONResponse:
        """The response with an error object."""
        return JSONResponse(body, self.status, self.headers)

    @classmethod
    def of(cls, error: BaseException, param: str | None = None) -> ApiError:
        """Makes an ApiError of any error. Only texts about the request go to its client; the others are logged.

        Args:
            error: the error that was raised.
            param: the field that holds the prompt.
        """
        if isinstance(error, cls):
            return error
        if isinstance(error, ContextExceeded):
            return cls(400, str(error), param=param, code="context_length_exceeded")
        if type(error) in (UserError, TemplateFailed):  # not their subclasses, whose texts may name files
            return cls(400, str(error))
        if isinstance(error, TimeoutError):
            return timed_out()
        known = isinstance(error, EdgemoeError)
        logging.getLogger("edgemoe").error("a request failed: %s", error, exc_info=None if known else error)
        if isinstance(error, DoesNotFit):
            message = (
                f"expected memory for this request, got too little: {_LOG}, so send a shorter one or wait"
            )
            return cls(503, message, kind=UNAVAILABLE, code="out_of_memory")
        if isinstance(error, DamagedData):
            message = f"expected a store that can be read whole, got damaged data: {_LOG}"
            return cls(500, message, kind=FAILED, code="damaged_data")
        if known:
            return cls(400, f"expected a request that the model can be given, got another: {_LOG}")
        return cls(500, f"{type(error).__name__}: {_LOG}", kind=FAILED)


def timed_out() -> ApiError:
    """The error of a request that took longer than the server's limit. Clients of OpenAI do not send it again."""
    message = (
        "expected an answer within the server's time limit, got none: use a smaller max_tokens or prompt"
    )
    return ApiError(504, message, kind=FAILED, code="timeout", headers={"x-should-retry": "false"})


def not_loaded() -> ApiError:
    """The error of a request that comes while the server starts."""
    return ApiError(503, "Loading model", kind=UNAVAILABLE, code=503, headers={"retry-after": "5"})


def unloaded(name: str) -> ApiError:
    """The error of a request for figures of a model that was unloaded."""
    message = (
        f"expected a loaded model, got {name!r}, which is unloaded: the next request for an answer loads it"
    )
    return ApiError(503, message, kind=UNAVAILABLE, code="model_unloaded")


def request_error(request: Request, error: Exception) -> ApiError:
    """The error of a request that a handler of HANDLED gets."""
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _of_routes(request, error), headers=error.headers)
    return ApiError.of(error)


def _of_routes(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"expected an endpoint of docs/serving.md, got {request.url.path!r}: see GET /v1/models"
    if error.status_code == 405:
        return f"expected another method, got {request.method}: see docs/serving.md"
    return error.detail


HANDLED = (ApiError, EdgemoeError, HTTPException, Exception)
"""Kinds of errors for which Starlette needs a handler each."""
