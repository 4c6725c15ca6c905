"""`odmoe serve` within a test's process: a real server on a port of its own, and clients of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from odmoe.api.model import Model, OpenedModel
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from support.paths import DEMO

if TYPE_CHECKING:
    from openai import OpenAI

    from odmoe.serve.connection import ClientLimits
    from odmoe.serve.key_ring import KeyRing
    from odmoe.serve.lifetime import HttpServer
    from odmoe.serve.service import Service

WAIT_S = 60.0


@dataclass
class Served:
    """A running service."""

    service: Service
    server: HttpServer
    address: tuple[str, int]
    lines: list[str] = field(default_factory=list)
    """Of its log."""
    code: list[int] = field(default_factory=list)
    """The exit code, once it has ended."""

    @property
    def host(self) -> str:
        """As clients name it in the header of this name."""
        return "{}:{}".format(*self.address)

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def counted(self, metric: str, **labels: str) -> float:
        """The value of one of its metrics now."""
        return self.service.meter.registry.get_sample_value(metric, labels) or 0.0

    def client(self, key: str = "none", **more: Any) -> OpenAI:
        """The official client. It sends a request once."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **({"max_retries": 0, "timeout": WAIT_S} | more))


def until(true: Callable[[], bool]) -> None:
    """Raises AssertionError where it does not become true."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_idle(served: Served) -> bool:
    """Nothing is left of any request, here or in the engine."""
    figures = served.service.model.cluster.figures()
    main: Any = served.service.model.cluster.main  # type: ignore[attr-defined]
    left = (figures.answered, figures.waiting, served.service.answer_pool.busy_threads, len(served.service.under_way))
    return left == (0, 0, 0, 0) and main.engine.idle()


def request_bytes(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: {served.host}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def demo_model(store: Any, **settings: Any) -> Iterator[Model]:
    """The demo model on an embedded cluster."""
    from main_node.shape import model_shape, with_context
    from odmoe.text import load_tokenizer

    usual: dict[str, Any] = {"model": str(DEMO), "shadow": "none", "threads": 1, "workers": 2}
    chosen = Settings(**(usual | settings))
    context = with_context(model_shape(store), chosen.ctx_size).context
    with OpenedModel(chosen, store, load_tokenizer(store.dense), context).start() as model:
        yield model


@contextmanager
def serving(
    model: Model, keys: tuple[str, ...] | KeyRing = (), client_limits: ClientLimits | None = None, **own: Any
) -> Iterator[Served]:
    """`own`: of `ServeSettings`."""
    from odmoe.serve.app import Access, make_app
    from odmoe.serve.key_ring import KeyRing
    from odmoe.serve.lifetime import HttpServer
    from odmoe.serve.start import make_service

    settings = ServeSettings(**own)
    service = make_service(model, settings)
    lines: list[str] = []
    ring = keys if isinstance(keys, KeyRing) else KeyRing([ApiKey(key) for key in keys])
    app = make_app(
        service,
        Access(ring, settings.cors_origin, lines.append, settings.log_format, settings.forwarded_allow_ips),
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = HttpServer(app, service, listening, settings.drain_timeout, client_limits=client_limits)
        served = Served(service, server, listening.getsockname(), lines)
        thread = threading.Thread(target=lambda: served.code.append(server.run()), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.stop()
            server.stop()
            thread.join(WAIT_S)
            service.close()
    assert not thread.is_alive()
