"""What ollama's clients ask about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`. There is one."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from odmoe.serve.api_error import ApiError
from odmoe.serve.computed import ComputedRoute
from odmoe.serve.ollama.request import model_name
from odmoe.serve.request_fields import Body
from odmoe.serve.sse import encode

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.service import Service

MANAGEMENT = ("pull", "push", "create", "copy", "delete", "embed", "embeddings")
"""Routes of ollama that are not supported."""
NEVER = "9999-12-31T00:00:00Z"
"""When the model leaves memory."""


def add_models(app: FastAPI, service: Service) -> None:
    """Those routes of ollama that answer no prompts, and those that are refused by name."""
    model = cache(lambda: _model(service))

    async def tags(request: Request) -> Response:
        return _json({"models": [model()]})

    async def running(request: Request) -> Response:
        more = {"expires_at": NEVER, "size_vram": 0, "context_length": service.context}
        return _json({"models": [{**model(), **more}]})

    async def own_version(request: Request) -> Response:
        return _json({"version": version("odmoe")})

    for name, answer in {"tags": tags, "ps": running, "version": own_version}.items():
        app.router.routes.append(Route(f"/api/{name}", answer, methods=["GET"]))
    app.router.routes.append(Route("/api/show", ComputedRoute(service, show), methods=["POST"]))
    for name in MANAGEMENT:
        app.router.routes.append(Route(f"/api/{name}", _refuse, methods=["POST", "DELETE"]))


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise ApiError(404, f"{path} is not supported: one model is served, and only for text", code="no_route")


def show(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Of the model that is served."""
    body = Body(given)
    name = body.take_any("model") or body.need("name", str)
    body.skip("name", "verbose", "system", "template", "options")
    body.end(service.unknown_fields)
    service.check_name(model_name(str(name)))
    manifest = service.model.opened.store.manifest
    template = str(getattr(service.tokenizer, "chat_template", None) or "")
    family = str(manifest.config.get("model_type", ""))
    capabilities = ["completion"]
    if "tools" in template:
        capabilities.append("tools")
    return {
        "license": "",
        "modelfile": "",
        "parameters": f"num_ctx {service.context}",
        "template": template,
        "details": _details(service),
        "model_info": {"general.architecture": family, f"{family}.context_length": service.context},
        "capabilities": capabilities,
        "modified_at": _time(service.created),
    }


def _model(service: Service) -> dict[str, Any]:
    manifest, store = service.model.opened.store.manifest, service.model.opened.store
    dense = sum(entry.stat().st_size for entry in os.scandir(store.dense) if entry.is_file())
    return {
        "name": service.name,
        "model": service.name,
        "modified_at": _time(service.created),
        "size": manifest.expert_bytes + dense,
        "digest": manifest.model_digest,
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    manifest = service.model.opened.store.manifest
    family = str(manifest.config.get("model_type", ""))
    return {
        "parent_model": "",
        "format": "odmoe",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": manifest.quantised_to or manifest.encoding or manifest.dtype,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
