"""Routes about the service itself: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from odmoe.serve.errors import told
from odmoe.serve.sse import encode
from scheduler.errors import ODMoEError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.service import Service

READY_S = 5.0
"""Longest wait for the main node to say that it is there."""


def add_status(app: FastAPI, service: Service) -> None:
    """`/v1/models`, `/health`, `/ready`, `/metrics`."""

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_described(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_name(name)
        return _json(_described(service))

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        why = await _missing(service)
        return _json({"status": "ready"}) if why is None else _json({"status": "not ready", "why": why}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        body, kind = await asyncio.to_thread(service.meter.render)
        return Response(body, headers={"Content-Type": kind})


async def _missing(service: Service) -> str | None:
    """Why no request can be answered now. The store was verified when it was opened."""
    if service.stopping:
        return "the server is stopping"
    try:
        figures = await asyncio.wait_for(asyncio.to_thread(service.model.cluster.figures), READY_S)
    except TimeoutError:
        return f"the main node has not answered for {READY_S:g} s"
    except ODMoEError as error:
        return told(error).message
    if not any(node.up for node in figures.nodes if node.role == "worker"):
        return "every worker is lost"
    return None


def _described(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "odmoe"}


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
