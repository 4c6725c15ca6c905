"""`odmoe chat --cluster FILE` asks for answers as `odmoe chat` without it gives them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.api.options import options_from_settings
from odmoe.commands.over_ssh import chat
from odmoe.serve.openai.engine_request import options_from_request
from odmoe.serve.openai.requests import AnswerRequest
from odmoe.settings.settings import Settings
from support.machines.cli import CommandLine

SEED = ("--seed", "7", "--stop", "END", "--stop", "STOP", "--ignore-eos")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`settings` of the service on the main host, and the `options` of each request, in place of ssh."""
    found: dict[str, Any] = {}

    class Service:
        def __init__(self, url: str, key: str, model: str, options: Mapping[str, Any], *rest: Any) -> None:
            found["options"] = json.loads(json.dumps(options))
            self.name = "demo-moe"

        def close(self) -> None:
            pass

    def send(request: str) -> None:
        found["settings"] = json.loads(request)["settings"]

    def follow(on_serving: Any) -> tuple[int, str]:
        on_serving("demo-moe", Path("socket"))
        return 0, ""

    @contextlib.contextmanager
    def started(cluster: Any) -> Iterator[Any]:
        yield SimpleNamespace(remote=SimpleNamespace(send=send), follow=follow, lost_error=lambda code, text: None)

    for name, double in {"RemoteModel": Service, "started_there": started, "read_cluster_file": Path}.items():
        monkeypatch.setattr(chat, name, double)
    monkeypatch.setattr(chat, "bring_up", lambda *given: None)
    monkeypatch.setattr("odmoe.commands.chat._converse", lambda model, *rest: model.name)
    return found


@pytest.mark.parametrize(
    "flags", [(), SEED, ("--temperature", "0.7"), ("--top-p", "0.5", *SEED), ("--temperature", "0", "--top-k", "3")]
)
def test_answers_are_drawn_and_end_as_without_a_cluster_file(
    flags: tuple[str, ...], asked: dict[str, Any], cli: CommandLine, tmp_path: Path
) -> None:
    answer = cli("chat", "--cluster", str(tmp_path / "cluster.yaml"), "-m", "demo-moe", *flags, "-q")
    assert answer.code == 0, answer.err
    service: Any = SimpleNamespace(settings=Settings(**asked["settings"]), tokenizer=())
    found = options_from_request(service, AnswerRequest(model="demo-moe", **asked["options"]))
    given = {"seed": 7, "stop": ("END", "STOP"), "ignore_eos": True} if "--seed" in flags else {}
    pairs = [(name.strip("-").replace("-", "_"), value) for name, value in pairwise(flags)]
    given |= {name: float(value) for name, value in pairs if name in ("temperature", "top_p", "top_k")}
    wanted = options_from_settings(Settings(**given))
    assert found["sampling"].overrides() == wanted["sampling"].overrides()
    assert found["sampling"].seed == wanted["sampling"].seed
    assert (found["stop"], found["ignore_eos"]) == (wanted["stop"], wanted["ignore_eos"])
    assert set(asked["options"]) == set(given)
