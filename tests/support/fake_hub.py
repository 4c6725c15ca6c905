"""A server that speaks to `huggingface_hub` as the Hub does: listings, metadata, ranges, and faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS = (".safetensors", ".gguf", ".bin")


@dataclass
class FakeHub:
    """`files`: name -> content of the one repository `org/name`."""

    files: dict[str, bytes]
    url: str = ""
    breaks_after: int | None = None
    """Bytes of an LFS file after which a connection is broken, for each request."""
    gated: bool = False
    wrong_bytes: bool = False
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    """The files that were asked for, each with its range."""

    def entries(self) -> list[dict[str, object]]:
        return [
            {"rfilename": name, "size": len(data), "blobId": _blob_id(data)}
            | ({"lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 100}} if name.endswith(LFS) else {})
            for name, data in self.files.items()
        ]


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The Hub's `url` while it is served."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if hub.gated:
                return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            if path.startswith("/api/models/org/name"):
                listing = {"id": "org/name", "sha": COMMIT, "siblings": hub.entries()}
                return self.reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
            _, _, rest = path.partition("/org/name/resolve/")
            name = rest.partition("/")[2]
            if name not in hub.files:
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound" if rest else "RepoNotFound"})
            return self.file(name)

        def file(self, name: str) -> None:
            data, asked = hub.files[name], self.headers.get("Range")
            digest = _sha256(data) if name.endswith(LFS) else _blob_id(data)
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if hub.wrong_bytes and name.endswith(LFS):
                data = bytes(len(data))
            if self.command == "GET":
                hub.ranges.append((name, asked))
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.reply(206 if asked else 200, data[start:], headers, hub.breaks_after if name.endswith(LFS) else None)

        def reply(self, status: int, body: bytes, headers: dict[str, str], most: int | None = None) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(body[:most])
            if most is not None and most < len(body):
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that leaves is part of the test
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
