"""Routes about the service itself: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from odmoe.serve.cluster_metrics import FiguresReader
from odmoe.serve.sse import encode

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.service import Service

READY_S = 5.0
"""Longest wait for the main node to say that it is there."""
TRIAL_TOKENS = 32
TRIAL_S = 5.0
"""Between two trials."""
FRESH_S = 1.0
"""How long what was found out is said again."""


def add_status(app: FastAPI, service: Service) -> None:
    """`/v1/models`, `/health`, `/ready`, `/metrics`."""
    readiness = Readiness(service)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_describe_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_name(name)
        return _json(_describe_model(service))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        why = await readiness.why_not()
        return _json({"status": "ready"}) if why is None else _json({"status": "not ready", "why": why}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        body, kind = await asyncio.get_running_loop().run_in_executor(service.scrape_pool, service.meter.render)
        return Response(body, headers={"Content-Type": kind})


class Readiness:
    """Whether a request can be answered now. However many ask, the cluster is asked once at a time. Strangers ask too:
    they are told no names and no places."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reader = FiguresReader(service.model.cluster, READY_S)
        self._trial = Trial(service)
        self._looking: asyncio.Future[str | None] | None = None
        self._until = 0.0

    async def why_not(self) -> str | None:
        """None: it can."""
        if self._service.stopping:
            return "the server is stopping"
        loop = asyncio.get_running_loop()
        if self._looking is None or (self._looking.done() and loop.time() >= self._until):
            self._looking = loop.run_in_executor(self._service.ready_pool, self._why_not_now)
            self._until = loop.time() + FRESH_S
        return await asyncio.shield(self._looking)

    def _why_not_now(self) -> str | None:
        figures = self._reader.read()
        if figures is None:
            return "the main node is lost or does not answer"
        if not any(node.up for node in figures.nodes if node.role == "worker"):
            return "every worker is lost"
        if self._service.failed.is_set() and not self._trial.succeeds():
            return "answers fail; the server's log has the cause"
        return None


class Trial:
    """An answer of one token, to see whether the cluster computes answers again after one has failed. Its prompt has
    tokens from all over the vocabulary, so that it needs many experts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pending: Future[bool] | None = None
        self._again_at = 0.0

    def succeeds(self) -> bool:
        """In a thread. However often it is asked, there is one trial at a time, and a while between two."""
        if self._pending is None or (self._pending.done() and time.monotonic() >= self._again_at):
            self._pending = Future()
            threading.Thread(target=self._run, args=(self._pending,), name="odmoe-ready", daemon=True).start()
        try:
            return self._pending.result(READY_S)
        except TimeoutError:
            return False

    def _run(self, pending: Future[bool]) -> None:
        found = False
        try:
            self._answer()
            self._service.failed.clear()
            found = True
        except BaseException:  # noqa: BLE001 - whatever it is, clients would get it too
            pass
        finally:
            self._again_at = time.monotonic() + TRIAL_S
            pending.set_result(found)

    def _answer(self) -> None:
        from main_node.sampling import GREEDY

        service = self._service
        count = max(1, min(TRIAL_TOKENS, service.context - 1))
        step = max(1, len(service.tokenizer) // count)
        prompt = list(range(0, len(service.tokenizer), step))[:count]
        with service.model.answer(prompt, 1, {"sampling": GREEDY}) as answer:
            for _ in answer:
                pass


def _describe_model(service: Service) -> dict[str, Any]:
    more = {"owned_by": "odmoe", "root": service.name, "max_model_len": service.context}
    return {"id": service.name, "object": "model", "created": service.created, **more}


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
