"""What waits to be written keeps its order and its bounds, whoever writes it."""

from __future__ import annotations

import threading
import time

from wire.rpc.outbox import Outbox


def drain(box: Outbox, written: list[bytes]) -> threading.Thread:
    """What gRPC's thread does with an outbox, slowly now and then."""

    def run() -> None:
        for i, data in enumerate(box):
            time.sleep(0.001 if i % 7 == 0 else 0)
            written.append(data)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_each_sender_s_messages_keep_their_order_however_they_are_written():
    written: list[bytes] = []

    def write(data: bytes) -> None:
        time.sleep(0.0005)  # long enough for the others to queue meanwhile
        written.append(data)

    box = Outbox(10_000, 1 << 30, write)
    thread = drain(box, written)

    def send(sender: int) -> None:
        for i in range(200):
            assert box.put(f"{sender} {i}".encode(), at_once=i % 3 > 0)
            time.sleep(0.001 if i % 50 == 0 else 0)  # so that the outbox runs empty, too

    senders = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(30)
    box.end()
    thread.join(10)
    assert len(written) == 800
    for n in range(4):
        assert [data for data in written if data.startswith(b"%d " % n)] == [b"%d %d" % (n, i) for i in range(200)]


def test_a_small_message_before_which_nothing_waits_is_written_by_its_sender():
    writers: list[str] = []
    box = Outbox(10, 1 << 30, lambda data: writers.append(threading.current_thread().name))
    assert box.put(b"small")
    assert writers == [threading.current_thread().name]
    assert box.put(bytes(Outbox.AT_ONCE_BYTES + 1))  # waits: there is no thread that drains
    assert box.put(b"small, but behind it")
    assert len(writers) == 1
    assert not box.idle()


def test_full_by_number_and_by_bytes():
    box = Outbox(3, 100)
    assert box.put(bytes(1000))  # alone, it may have any size
    assert not box.put(b"x")
    few = Outbox(3, 100)
    assert few.put(b"a", b"b")
    assert not few.put(b"c", b"d")  # both or none
    assert few.put(b"c")
    assert not few.put(b"d")
    assert few.waiting() == "3 messages of 0 MiB wait"
    few.end()
    assert list(few) == [b"a", b"b", b"c"]
    assert few.idle()


def test_what_has_been_written_makes_room():
    box, written = Outbox(2, 100), []
    thread = drain(box, written)
    deadline = time.monotonic() + 10
    for i in range(50):
        while not box.put(bytes([i]) * 60):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    box.end()
    thread.join(10)
    assert written == [bytes([i]) * 60 for i in range(50)]
