"""KV rows of a main model on an accelerator, on their way to a shadow elsewhere, and what becomes of their errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint.devices.streams import HostCopies, Landing
from checkpoint.devices.transfer import to_device
from checkpoint.kv import CachePiece, Growing
from main_node import shadow_sender
from main_node.answer import collect
from main_node.engine import sequence
from main_node.engine.peers import Peers
from main_node.shadow_sender import ShadowSender
from scheduler import types as t
from shadow_node.model import ShadowModel
from shadow_node.node import ALIGNMENT_BYTES
from support.devices.counted_device import counted_device
from support.nodes.engine_world import WAIT_S, Desk, Fake, MadeUp, close, good
from support.nodes.served_cluster import ServedCluster
from wire import messages as w
from wire.credit import MESSAGE_BYTES
from wire.serial import SerialThread

pytestmark = pytest.mark.timeout(60)
ROW_BYTES = 4 * 2 * 3 * 4
"""Of the four tensors of a position in `MadeUp`."""


@pytest.fixture
def device() -> Iterator[torch.device]:
    with counted_device() as (found, _):
        yield found


@pytest.fixture
def there(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up requests have their rows on the accelerator, and the shadow is in another process."""
    made = MadeUp.kv_rows

    def rows(self: MadeUp, start: int, stop: int, states: bool = True) -> CachePiece:
        found = made(self, start, stop, states)
        sent = to_device(device, *(row.tensor.contiguous() for row in found.rows))
        return CachePiece(start, stop, [Growing(one, -2, start) for one in sent])

    monkeypatch.setattr(MadeUp, "kv_rows", rows)
    monkeypatch.setattr(Peers, "shadow_travels", True)


class Waiting:
    """Copies that end when `go` is set. The first then fails with `error`, if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.error = threading.Event(), None
        self.threads: set[str] = set()
        wait = Landing.wait

        def waiting(landing: Landing) -> list[torch.Tensor]:
            self.threads.add(threading.current_thread().name)
            assert self.go.wait(WAIT_S)
            error, self.error = self.error, None
            if error is not None:
                raise error
            return wait(landing)

        monkeypatch.setattr(Landing, "wait", waiting)

    error: Exception | None


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    made = Waiting(monkeypatch)
    yield made
    made.go.set()


def until_lost(desk: Desk) -> None:
    peers = desk.engine.peers
    with peers._changed:
        assert peers._changed.wait_for(lambda: peers.shadow is None and "shadow" in peers.lost, WAIT_S)


def aligned(told: Fake) -> list[tuple[int, int, int]]:
    return [(m.step, m.kv_start, m.kv[0].shape[2]) for m in told.of(w.Align)]


@pytest.mark.usefixtures("there")
def test_rows_and_what_follows_them_are_sent_in_order_by_another_thread(desk: Desk, waiting: Waiting) -> None:
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    assert told.of(w.Align) == [], "their copies have not ended"
    waiting.go.set()
    told.wait(w.Align, 2)
    desk.engine.close_request(1)
    assert told.wait(w.CloseRequest) == [w.CloseRequest(1)]
    assert aligned(told) == [(0, 0, 5), (1, 5, 1)]
    assert waiting.threads == {"to-shadow"}


ERRORS = (
    (torch.AcceleratorError("an illegal memory access was encountered"), "not copied from the accelerator"),
    (torch.OutOfMemoryError("no page-locked memory"), "not copied from the accelerator"),
    (ValueError("a defect"), "a message for the shadow was not made: ValueError: a defect"),
)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(("error", "said"), ERRORS)
def test_a_copy_that_fails_on_its_way_loses_the_shadow_by_name(
    error: Exception, said: str, desk: Desk, waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    """Without that the alignment is gone, and the shadow waits for it or refuses the next one."""
    desk.workers(good)
    desk.shadow()
    desk.open()
    waiting.error = error
    waiting.go.set()
    until_lost(desk)
    assert said in caplog.text
    assert str(error).splitlines()[0] in caplog.text
    again = desk.shadow()
    desk.engine.post(t.TokenDecoded(1, 1))
    again.wait(w.Align, 2)
    assert aligned(again) == [(0, 0, 5), (1, 5, 1)], "the next one gets everything"


@pytest.mark.usefixtures("there")
def test_a_copy_that_does_not_begin_loses_the_shadow_and_the_request_goes_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(self: HostCopies, tensors: Any) -> Any:
        raise torch.OutOfMemoryError("no page-locked memory")

    monkeypatch.setattr(HostCopies, "begin", begin)
    desk.workers(good)
    desk.shadow()
    desk.open()
    assert desk.engine.peers.lost == ["shadow"]
    assert "KV rows were not copied from the accelerator: OutOfMemoryError: no page-locked memory" in caplog.text
    assert 1 in desk.core.stats
    assert desk.engine._to_shadow.carrier.begun_bytes == desk.engine._to_shadow.carrier._ended_bytes


@pytest.mark.usefixtures("there")
def test_rows_that_wait_are_bounded_in_bytes(
    desk: Desk, waiting: Waiting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carrier = desk.engine._to_shadow.carrier
    carrier._most_bytes = 6 * ROW_BYTES
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    assert desk.engine.peers.lost == [], "five rows and one"
    desk.engine.post(t.TokenDecoded(1, 2))
    assert desk.engine.peers.lost == ["shadow"]
    assert f"{6 * ROW_BYTES} bytes of KV rows wait to be sent to the shadow, {6 * ROW_BYTES} may" in caplog.text
    waiting.go.set()
    until_ended(carrier)
    assert told.of(w.Align) == [] or len(told.of(w.Align)) == 1
    carrier._most_bytes = 100 * ROW_BYTES
    again = desk.shadow()
    again.wait(w.Align)
    assert aligned(again)[0][1] == 0


@pytest.mark.parametrize("where", ["accelerator", "host"])
def test_rows_of_a_prompt_that_are_too_many_are_left_out_and_the_shadow_stays(
    where: str, desk: Desk, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """It was lost, came again, got the same rows and was lost again, for ever."""
    if where == "accelerator":
        request.getfixturevalue("there")
    desk.engine._to_shadow.carrier._most_bytes = 4 * ROW_BYTES
    desk.workers(good)
    told = desk.shadow()
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    told.wait(w.Align, 2)
    assert desk.engine.peers.lost == []
    assert [(m.step, m.kv_start, len(m.kv)) for m in told.of(w.Align)] == [(0, 5, 0), (1, 5, 4)]
    assert f"first 5 tokens take {5 * ROW_BYTES} bytes, too many" in caplog.text
    close(told, w.CloseRequest(1))
    again = desk.shadow()
    desk.engine.post(t.TokenDecoded(1, 2))
    again.wait(w.Align, 2)
    assert desk.engine.peers.lost == ["shadow"], "it was closed above, once"
    assert [(m.step, m.kv_start, len(m.kv)) for m in again.of(w.Align)] == [(1, 6, 0), (2, 6, 4)]


def test_as_many_rows_as_may_be_sent_may_wait_at_the_shadow() -> None:
    parts = 2 * -(-sequence.MOST_BYTES // sequence.ALIGN_PART_BYTES)
    assert sequence.MOST_BYTES + parts * MESSAGE_BYTES <= ALIGNMENT_BYTES


@pytest.mark.usefixtures("there")
def test_an_error_ends_the_shadow_that_the_message_was_for(
    desk: Desk, waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    desk.workers(good)
    first = desk.shadow()
    desk.open()
    until_waiting(waiting)
    close(first, w.CloseRequest(1))
    second = desk.shadow()
    waiting.error = ValueError("a defect")
    waiting.go.set()
    until_ended(desk.engine._to_shadow.carrier)
    assert desk.engine.peers.lost == ["shadow"], "the first, when it was closed"
    assert desk.engine.peers.shadow is not None
    assert not second.closed.is_set()


def until_waiting(waiting: Waiting) -> None:
    end = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if waiting.threads:
            return
        end.wait(0.01)
    raise AssertionError("no copy was waited for")


def test_copies_of_messages_that_are_not_made_are_ended(desk: Desk) -> None:
    sender = desk.engine._to_shadow

    def make(carrier: sequence.Carrier) -> Any:
        carrier._reserve(100)
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        sender.send(make)
    assert sender.carrier.begun_bytes == sender.carrier._ended_bytes == 100


def test_a_thread_that_is_started_while_the_sender_closes_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = desk.engine._to_shadow
    closing: list[threading.Thread] = []

    def start(*args: Any) -> SerialThread:
        closing.append(threading.Thread(target=sender.close))
        closing[0].start()
        closing[0].join(0.2)
        return SerialThread(*args)

    def make(carrier: sequence.Carrier) -> list[w.Message]:
        carrier._reserve(100)
        return []

    monkeypatch.setattr(shadow_sender, "SerialThread", start)
    sender.send(make)
    closing[0].join(WAIT_S)
    assert not any(thread.name == "to-shadow" and thread.is_alive() for thread in threading.enumerate())


def until_ended(carrier: Any) -> None:
    end = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if carrier.begun_bytes == carrier._ended_bytes:
            return
        end.wait(0.01)
    raise AssertionError("copies of a shadow that was lost still count")


def test_what_waits_for_a_shadow_that_was_lost_is_not_sent_to_the_next(
    desk: Desk, there: None, waiting: Waiting
) -> None:
    desk.workers(good)
    first = desk.shadow()
    desk.open()
    desk.engine.post(t.TokenDecoded(1, 1))
    close(first, w.CloseRequest(1))
    assert desk.engine.peers.lost == ["shadow"]
    second = desk.shadow()
    waiting.go.set()
    second.wait(w.Align, 1)
    desk.engine.post(t.TokenDecoded(1, 2))
    second.wait(w.Align, 2)
    assert aligned(second) == [(1, 0, 6), (2, 6, 1)]


@pytest.mark.slow
def test_with_all_other_nodes_elsewhere_the_tokens_are_the_same(
    device: torch.device,
    demo_store: Callable[[str], Any],
    nf4: ShadowModel,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers and shadow get rows and KV rows over gRPC."""
    wanted = reference("float32", 0, 8)
    names: set[str] = set()
    wait = Landing.wait

    def waiting(landing: Landing) -> list[torch.Tensor]:
        names.add(threading.current_thread().name)
        return wait(landing)

    monkeypatch.setattr(Landing, "wait", waiting)
    cluster = ServedCluster(demo_store("float32"), workers=2, shadow=nf4, device=str(device))
    try:
        tokens, report = collect(cluster.main.generate(wanted.prompt, 8, ignore_eos=True))
        carrier = cluster.engine._to_shadow.carrier
        until_ended(carrier)
    finally:
        cluster.close()
    assert tokens == wanted.tokens
    assert (report.cluster.lost, report.recall_complete, names) == ([], True, {"to-shadow"})
    assert report.recall > 0.9
    assert carrier.begun_bytes > 0


def test_nothing_is_sent_after_the_end(desk: Desk, there: None, waiting: Waiting) -> None:
    desk.workers(good)
    desk.shadow()
    desk.open()
    waiting.go.set()
    sender: ShadowSender = desk.engine._to_shadow
    desk.engine.close()
    sends: Callable[[Any], Any] = lambda carrier: [w.CloseRequest(1)]  # noqa: E731
    sender.send(sends)
    assert not any(thread.name == "to-shadow" and thread.is_alive() for thread in threading.enumerate())
