"""Parts of a shadow that do not belong together, answer too late, or get rows that do not fit."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from scheduler.errors import DeadlineError, LinkError, ModelMismatchError, ProtocolError
from shadow_node.stages import remote, rows
from shadow_node.stages.later import LaterStage
from shadow_node.stages.node import Stage
from wire.messages import Message

pytestmark = pytest.mark.slow
PROMPT = [5, 17, 3, 60, 41, 9]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"scheme": "nf4"}, "has fp16, layers .*; the shadow wants nf4, layers"),
        ({"rooms": (3, 1)}, "has fp16, layers [0-9]+ to 7, cpu; the shadow wants fp16, layers [0-9]+ to 7, cpu"),
    ],
)
def test_parts_that_do_not_belong_together(other: dict[str, Any], says: str, first_of: Any) -> None:
    with pytest.raises(ModelMismatchError, match=f"part 1 of the shadow at .* {says}"):
        first_of(**other).reach()


def test_a_part_of_another_model(stage: Stage, first_of: Any) -> None:
    stage.belongs = "another", stage.belongs[1]
    with pytest.raises(ModelMismatchError, match="fingerprint another"):
        first_of().reach()


def test_a_part_that_answers_too_late_is_lost(
    prompted: Any, later: LaterStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, cache, lost = prompted
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    monkeypatch.setattr(remote, "OWN_TIMES", 0.0)
    run, held = later.run, threading.Event()
    monkeypatch.setattr(later, "run", lambda *args: held.wait(30) and run(*args))
    with pytest.raises(DeadlineError, match=r"part 1 of the shadow did not answer within 0\.2 s"):
        first.forward([7], cache)
    held.set()
    (error,) = lost
    assert isinstance(error, LinkError)
    with pytest.raises(LinkError, match="not connected"):
        first.forward([7], cache)
    monkeypatch.undo()
    first.reach()
    assert first.forward(PROMPT, first.new_cache()) >= 0


def test_rows_that_do_not_fit_fail_the_next_pass_alone(first_of: Any) -> None:
    first = first_of()
    first.reach()
    cache = first.new_cache()
    first.forward(PROMPT, cache)
    wrong = [torch.zeros(1, 1, 1, 3) for layout in cache._layouts for _ in layout.axes]
    own = len(cache._layouts[0].axes)
    right = [tensor[:, :, :1] for layer in cache.here.layers[:own] for tensor in (layer.keys, layer.values)]
    assert cache.put(len(PROMPT) - 1, [*right[:own], *wrong[own:]]) == len(PROMPT)
    with pytest.raises(ProtocolError, match=r"alignment has KV rows of shape \(1, 1, 1, 3\)"):
        first.forward([7], cache)
    again = first.new_cache()
    assert first.forward(PROMPT, again) == first.forward(PROMPT, first.new_cache())


def test_a_hidden_state_goes_in_pieces(first_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = first_of()
    first.reach()
    wanted = first.forward(PROMPT, first.new_cache())
    sent: list[Message] = []
    send = first.stages[0].send

    def note(message: Message) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(first.stages[0], "send", note)
    monkeypatch.setattr(rows, "PIECE_BYTES", 1)
    assert first.forward(PROMPT, first.new_cache()) == wanted
    assert len(sent) == len(PROMPT)


def test_streams_that_begin_together_share_a_part(first_of: Any) -> None:
    """Each Hello of a main node reaches for the parts."""
    first, made = first_of(), list[Any]()
    (connect_once,) = first.connects

    def connect(handler: Any) -> Any:
        time.sleep(0.2)
        made.append(connect_once(handler))
        return made[-1]

    first.connects = [connect]
    threads = [threading.Thread(target=first.reach) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
