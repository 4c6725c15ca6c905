"""deploy/nginx/odmoe.conf with a real nginx before a real service."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

from support.machines.processes import Running, Starter
from support.machines.served_process import SERVED_SMALL
from support.paths import ROOT

KEY = "a-key-of-twenty-characters"
pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="there is no nginx")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A certificate for localhost, and a file of keys."""
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *name]
    subprocess.run([*made, "-keyout", tmp_path / "k.pem", "-out", tmp_path / "c.pem"], check=True, timeout=60)
    (tmp_path / "keys").write_text(f"anna:{KEY}\n")
    return tmp_path


def proxy(folder: Path, service: str, port: int) -> subprocess.Popen[bytes]:
    """nginx with the file as it is, but for its names, ports and paths."""
    text = (ROOT / "deploy" / "nginx" / "odmoe.conf").read_text()
    text = text.replace("127.0.0.1:8000", service).replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    text = text.replace("chat.example.org", "localhost")
    text = re.sub(r"ssl_certificate /[^;]*", f"ssl_certificate {folder}/c.pem", text)
    text = re.sub(r"ssl_certificate_key /[^;]*", f"ssl_certificate_key {folder}/k.pem", text)
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi"))
    main = f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
    (folder / "nginx.conf").write_text(
        f"{main}http {{ access_log off; {places} scgi_temp_path {folder}/scgi;\n{text}\n}}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    subprocess.run([*command, "-t", "-q"], check=True, timeout=30)
    return subprocess.Popen(command)


def said(running: Running, word: str) -> str:
    """The message of the next line of its log with this word."""
    assert running.process.stderr is not None
    for line in running.process.stderr:
        if word in (message := str(json.loads(line).get("message", ""))):
            return message
    raise AssertionError(f"it ended with {running.process.wait()}")


def test_tokens_come_as_they_are_made_over_tls(start: Starter, demo: Path, files: Path) -> None:
    port = free_port()
    url = f"https://localhost:{port}"
    more = ("--api-key-file", str(files / "keys"), "--forwarded-allow-ips", "127.0.0.1", "--log-format", "json")
    running = start("serve", "-m", str(demo), *SERVED_SMALL, *more)
    service = said(running, "serving ").rpartition("http://")[2].removesuffix("/v1")
    nginx = proxy(files, service, port)
    headers = {"Authorization": f"Bearer {KEY}", "X-Forwarded-For": "203.0.113.9"}
    try:
        with httpx2.Client(verify=ssl.create_default_context(cafile=files / "c.pem"), timeout=60) as client:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                try:
                    assert client.get(f"{url}/ready").status_code == 200
                    break
                except httpx2.ConnectError:
                    time.sleep(0.1)
            assert client.get(f"{url}/metrics", headers=headers).status_code == 404
            body = {"model": "demo-moe", "prompt": "HAMLET", "max_tokens": 200, "stream": True, "ignore_eos": True}
            arrivals: list[float] = []
            with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.monotonic())
            assert len(arrivals) > 20
            assert arrivals[len(arrivals) // 2] - arrivals[0] > 0.2 * (arrivals[-1] - arrivals[0])
            (files / "keys").write_text(f"bert:{KEY[::-1]}\n")
            running.interrupt(signal.SIGHUP)
            assert "keys read again; 1 open" in said(running, "SIGHUP")
            statuses = [
                client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
                for key in (KEY, KEY[::-1])
            ]
            assert statuses == [401, 200]
    finally:
        nginx.terminate()
        nginx.wait(30)
    running.interrupt()
    code, _, err = running.finish()
    assert code == 0
    lines = [json.loads(line) for line in err.decode().splitlines()]
    asked = [(line["client"], line.get("key"), line["status"]) for line in lines if "path" in line]
    assert asked[-2:] == [("127.0.0.1", None, 401), ("127.0.0.1", "bert", 200)]
