# SPDX-License-Identifier: Apache-2.0
"""What the server answers when it cannot do as asked: OpenAI's envelope, everywhere."""

import json
import re
import traceback
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tensorrt_llm import logger
from tensorrt_llm._torch.pyexecutor.llm_request import FailureKind
from tensorrt_llm.llmapi import RequestError
from tensorrt_llm.llmapi.strict_model import describe_error, error_path

INVALID = "invalid_request_error"
UNAUTHORIZED = "authentication_error"
SERVER = "server_error"

_STATUS_OF_FAILURE = {
    FailureKind.CAPACITY: 503,
    FailureKind.REQUEST: 500,
    FailureKind.FATAL: 500,
    FailureKind.SHUTDOWN: 503,
}


class ApiError(Exception):
    """An answer other than success. `param` is the dotted path of the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def to_response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status)

    def to_event(self) -> str:
        """The error inside a stream; OpenAI's client raises it."""
        return f"data: {json.dumps(self.body)}\n\n"


def invalid_argument(error: ValueError | TypeError) -> ApiError:
    """A refusal by the engine or by `SamplingParams`, as the client's mistake."""
    message = str(error)
    named = re.match(r"SamplingParams\.(\w+)=", message)
    param = named.group(1) if named else None
    return ApiError(400, message.removeprefix("SamplingParams."), param=param)


def failed_request(error: RequestError) -> ApiError:
    """A request that the engine took and could not finish."""
    return ApiError(_STATUS_OF_FAILURE[error.kind], str(error), kind=SERVER, code=error.kind.value)


def unknown_model(asked: str, served: list[str]) -> ApiError:
    message = f"the model {asked!r} does not exist; this server has {', '.join(map(repr, served))}"
    return ApiError(404, message, param="model", code="model_not_found")


def install_handlers(app: FastAPI, on_error: Callable[[int], None]) -> None:
    """Answer every exception of `app` in the envelope, after telling `on_error` the status."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        api_error = _as_api_error(request, error)
        on_error(api_error.status)
        return api_error.to_response()

    for kind in (ApiError, RequestValidationError, RequestError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_middleware(_FaultBarrier, on_error=on_error)


class _FaultBarrier:
    """Answers a fault of ours with status 500 and keeps the connection, which the framework would close."""

    def __init__(self, app: ASGIApp, on_error: Callable[[int], None]) -> None:
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal answer_begun
            answer_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            if answer_begun or scope["type"] != "http":
                raise
            logger.error(f"{scope['method']} {scope['path']} failed:", traceback.format_exc())
            self._on_error(500)
            await internal_error().to_response()(scope, receive, send)


def _as_api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _malformed(error)
        case RequestError():
            return failed_request(error)
        case HTTPException():
            return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        case _:
            raise error


def internal_error() -> ApiError:
    """A fault of ours, about which a client need not know more."""
    return ApiError(500, "internal error; the server's log has it", kind=SERVER)


def _malformed(error: RequestValidationError) -> ApiError:
    details = [_without_body(detail) for detail in error.errors()]
    message = "; ".join(_describe(detail) for detail in details)
    return ApiError(400, message, param=error_path(details[0]) or None)


def _without_body(detail: dict[str, Any]) -> ErrorDetails:
    """Pydantic's detail with a path from the body's root; a JSON fault has a place, not a path."""
    is_json_fault = detail["type"] == "json_invalid"
    return cast(ErrorDetails, {**detail, "loc": () if is_json_fault else tuple(detail["loc"][1:])})


def _describe(detail: ErrorDetails) -> str:
    if detail["type"] == "json_invalid":
        return f"the body is not JSON: {detail['ctx']['error']}"
    if not detail["loc"] and detail["type"] in ("missing", "model_attributes_type", "dict_type"):
        return "the body must be a JSON object, with content type application/json"
    return describe_error(detail)
