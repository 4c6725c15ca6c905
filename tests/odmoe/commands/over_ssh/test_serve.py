"""Keys of a service on a cluster: the main host has those that were read last."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from odmoe.commands.over_ssh.serve import _Service
from odmoe.machines.head import KEYS
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.terminal import Output, Terminal

FORMER, LATTER = "former-key-of-a-user", "latter-key-of-a-user"


def test_a_hangup_while_the_service_there_is_told_its_keys(tmp_path: Path) -> None:
    """The keys are read again between the request, which has the former ones, and what follows it."""
    file = tmp_path / "keys"
    file.write_text(FORMER)
    own, sent, threads = ServeSettings(api_key_file=str(file)), list[str](), list[threading.Thread]()

    class Main:
        """The main host's standard input."""

        def send(self, line: str) -> None:
            sent.append(line)
            if len(sent) == 1:
                file.write_text(LATTER)
                threads.append(threading.Thread(target=service.read_keys_again))
                threads[0].start()
                threads[0].join(0.2)

    nothing: Any = None
    service = _Service(Settings(cluster="c.yaml"), own, own.keys(), Output(), nothing, Terminal(), nothing)
    service._send_keys_to(Main())  # type: ignore[arg-type]
    threads[0].join(10)
    assert json.loads(sent[0])["keys"][0]["key"] == FORMER
    assert json.loads(sent[-1].removeprefix(KEYS))[0]["key"] == LATTER
