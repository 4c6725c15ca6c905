"""The page at `/`, and what it asks about the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from odmoe.serve.api_error import to_api_error
from odmoe.serve.page.feed import ActivityFeed, feed_events
from odmoe.serve.page.planned import ClusterPlan
from odmoe.serve.page.static_files import HEADERS, StaticFile, static_files
from odmoe.serve.page.updates import describe_cluster
from odmoe.serve.sse import EventStream, encode, event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI

    from odmoe.serve.service import Service


def add_page(app: FastAPI, service: Service) -> None:
    """`/` and its files; `/cluster`, `/cluster/plan`, `/cluster/events`."""
    feed, planned = ActivityFeed(service.model.cluster), ClusterPlan(service)
    description = encode(describe_cluster(service))
    for path, file in static_files().items():
        app.router.routes.append(Route(path, _answering(file), methods=["GET"]))

    @app.get("/cluster")
    async def cluster() -> Response:
        return Response(description, media_type="application/json", headers={"Cache-Control": "no-store"})

    @app.get("/cluster/plan")
    async def plan() -> Response:
        found = encode(await planned.get())
        return Response(found, media_type="application/json", headers={"Cache-Control": "no-store"})

    @app.get("/cluster/events")
    async def events(request: Request) -> Response:
        def failed(error: Exception) -> bytes:
            return event(to_api_error(error, request.state.record.id).as_object())

        return EventStream(feed_events(feed, service, request), failed)


def _answering(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "Content-Type": file.kind})

    return answer
