"""The application: routes, and what every request passes on its way to them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from odmoe.serve.access_log import FORMATS, GONE, AccessLog
from odmoe.serve.api_error import ApiError, ClientGoneError, to_api_error
from odmoe.serve.callers import Crowded, CsrfGuard, Keys
from odmoe.serve.error_forms import error_object
from odmoe.serve.key_ring import KeyRing
from odmoe.serve.ollama.models import add_models
from odmoe.serve.page.routes import add_page
from odmoe.serve.routes import add_answers
from odmoe.serve.status import add_status
from odmoe.serve.tokens import add_tokens
from scheduler.errors import ODMoEError
from scheduler.unknown_names import nearest

if TYPE_CHECKING:
    from odmoe.serve.service import Service

PROMPTS = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/messages": "messages"}
"""What the prompt is made of, by path."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask, and where it is written down."""

    keys: KeyRing = field(default_factory=KeyRing)
    """Of none: everybody may."""
    origins: tuple[str, ...] = ()
    """Web pages of other hosts whose scripts may ask."""
    log: Callable[[str], None] = lambda line: None
    log_format: str = "text"
    proxies: tuple[str, ...] = ()
    """Addresses and networks whose `X-Forwarded-For` is believed."""


def make_app(service: Service, access: Access) -> FastAPI:
    """FastAPI's own pages of documentation are left out: they load scripts from elsewhere. So is its telemetry."""
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    add_answers(app, service)
    add_status(app, service)
    add_tokens(app, service)
    add_models(app, service)
    add_page(app, service)
    _add_errors(app, service)
    # The last one added is the first that a request comes to. A browser asks for leave without a key.
    if len(access.keys):
        app.add_middleware(Keys, keys=access.keys, on_refused=service.meter.on_refused)
    else:
        app.add_middleware(CsrfGuard, origins=access.origins, on_refused=service.meter.on_refused)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(Crowded, on_refused=service.meter.on_refused)
    app.add_middleware(AccessLog, write=access.log, line=FORMATS[access.log_format])
    if access.proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(access.proxies))  # type: ignore[arg-type]
    return app


def _no_route(request: Request, error: HTTPException) -> str:
    """With the nearest path, if there is none of this name."""
    path, known = request.url.path, [getattr(route, "path", "") for route in request.app.routes]
    near = nearest(path, [one for one in known if "{" not in one]) if error.status_code == 404 else ""
    return f"{request.method} {path}: {error.detail}{near}"


def _add_errors(app: FastAPI, service: Service) -> None:
    """Every error is answered in the form of the API that was asked."""

    async def explain(request: Request, error: Exception) -> Response:
        headers = None
        if isinstance(error, HTTPException):
            headers = error.headers  # such as Allow
            error = ApiError(error.status_code, _no_route(request, error), code="no_route")
        record = request.state.record
        service.log_failure(record.id, error)
        answer = to_api_error(error, record.id)
        if answer.param == "prompt":
            answer.param = PROMPTS.get(record.path, answer.param)
        if record.finish is None:  # no answer has begun
            record.finish = answer.code or answer.kind
            service.meter.on_refused(record.finish)
        return answer.response(headers, error_object(answer, record.path, record.id))

    async def leave(request: Request, error: Exception) -> Response:
        request.state.record.finish = "cancelled"
        return Response(status_code=GONE)  # nobody gets it

    for kind in (ApiError, ODMoEError, HTTPException, Exception):
        app.add_exception_handler(kind, explain)
    app.add_exception_handler(ClientGoneError, leave)
