"""Experts that the main node sends to a worker's part of a store: kept if they are right, refused by name if not."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest

from checkpoint.held import HELD, held_text
from checkpoint.store import ExpertStore
from scheduler.types import ExpertId
from support.nodes.worker_desk import MainEnd, WorkerDesk
from wire.messages import Held, Keep, Kept, Load, Loaded
from worker_node.loaders.disk import DiskLoader

BlobOf = Callable[[int, int], bytes]
HAS, GETS = ExpertId(0, 1), ExpertId(1, 3)


@pytest.fixture
def part(desk: WorkerDesk, tmp_path: Path) -> ExpertStore:
    """Holds one expert, and nothing in the place of another."""
    folder = Path(shutil.copytree(desk.store.path, tmp_path / "part"))
    (folder / HELD).write_text(json.dumps({"manifest": "digest", **json.loads(held_text([HAS]))}))
    file, place = desk.store.locate(*GETS)
    with (folder / file.name).open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(bytes(place.length))
    desk.store = ExpertStore.open(folder)
    return desk.store


@pytest.fixture
def main(desk: WorkerDesk, part: ExpertStore) -> MainEnd:
    return desk.welcome(desk.worker(loader=DiskLoader(part)))


@pytest.fixture
def pieces(part: ExpertStore, blob: BlobOf) -> list[Keep]:
    """The bytes of the expert that it gets."""
    data = blob(*GETS)
    half = len(data) // 2
    return [Keep(1, *GETS, "", 0, data[:half], False), Keep(2, *GETS, "", half, data[half:], True)]


def asked(main: MainEnd, *messages: Keep) -> str:
    """The error of the last answer."""
    main.send(*messages)
    answers = [main.next() for _ in messages]
    assert [answer.number for answer in answers if isinstance(answer, Kept)] == [one.number for one in messages]
    assert all(answer == Kept(answer.number) for answer in answers[:-1] if isinstance(answer, Kept))
    last = answers[-1]
    return last.error if isinstance(last, Kept) else ""


def test_an_expert_that_came_in_pieces_is_held_and_loaded(
    main: MainEnd, part: ExpertStore, pieces: list[Keep], blob: BlobOf
) -> None:
    main.send(Load(5, 0, *GETS))
    main.failure("NotHeldError", load_id=5)
    main.send(*pieces)
    assert [main.next() for _ in range(3)] == [Kept(1), Held(True, (0, 1, 1, 1, 3, 3)), Kept(2)]
    main.send(Load(6, 0, *GETS))
    assert main.next() == Loaded(6, len(blob(*GETS)), ANY, True)
    again = ExpertStore.open(part.path)
    assert again.held == {HAS, GETS}
    assert again.verify().blobs == 2
    assert json.loads((part.path / HELD).read_text())["manifest"] == "digest"


REFUSED: dict[str, tuple[Callable[[list[Keep]], list[Keep]], str]] = {
    "other bytes": (
        lambda p: [p[0], replace(p[1], data=bytes(len(p[1].data)))],
        "CorruptStoreError: expert 3 of layer 1 fails its checksum as it came",
    ),
    "too few": (lambda p: [replace(p[0], last=True)], "CorruptStoreError: expert 3 of layer 1 fails its checksum"),
    "a gap": (lambda p: [p[1]], "ProtocolError: byte .* of expert 3 of layer 1 came without those before it"),
    "another in between": (
        lambda p: [p[0], replace(p[1], expert=2)],
        "ProtocolError: byte .* of expert 2 of layer 1 came without those before it",
    ),
    "too many": (
        lambda p: [p[0], replace(p[1], data=p[1].data + bytes(4096))],
        "ProtocolError: expert 3 of layer 1 has .* bytes here, and more were sent",
    ),
    "a form that is not here": (lambda p: [replace(p[0], form="int4")], "StoreError: the store has no experts in form"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_by_name_and_comes_right_afterwards(
    case: str, main: MainEnd, part: ExpertStore, pieces: list[Keep]
) -> None:
    change, error = REFUSED[case]
    listed = (part.path / HELD).read_text()
    assert re.match(error, asked(main, *change(pieces)))
    assert (part.path / HELD).read_text() == listed
    main.send(*pieces)
    assert [main.next() for _ in range(3)][::2] == [Kept(1), Kept(2)]
    assert ExpertStore.open(part.path).held == {HAS, GETS}


def test_what_it_has_is_neither_written_nor_an_error(main: MainEnd, part: ExpertStore, pieces: list[Keep]) -> None:
    file, _ = part.locate(*HAS)
    before = file.read_bytes()
    assert asked(main, replace(pieces[0], layer=0, expert=1)) == ""
    main.send(*pieces)
    assert [main.next() for _ in range(3)][::2] == [Kept(1), Kept(2)]
    assert asked(main, *(replace(one, data=bytes(len(one.data))) for one in pieces)) == ""
    assert file.read_bytes() == before
    assert ExpertStore.open(part.path).verify().blobs == 2


def test_manifests_are_read_once_while_they_stay_the_same(
    desk: WorkerDesk, main: MainEnd, part: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = desk.workers[0]._part_watch
    monkeypatch.setattr(ExpertStore, "open", opened := Mock(wraps=ExpertStore.open))
    for _ in range(3):
        watch.check_same()
    assert opened.call_count == 1
    (part.path / "manifest.json").touch()
    watch.check_same()
    assert opened.call_count == 2


def test_without_room_nothing_is_written(
    main: MainEnd, part: ExpertStore, pieces: list[Keep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=(256 << 20) // 4096, f_frsize=4096))
    assert asked(main, pieces[0]).startswith(f"DoesNotFitError: {part.path} has 0.27 GB free")
    file, place = ExpertStore(part.path, part.manifest).locate(*GETS)
    assert not any(file.read_bytes()[place.offset :][: place.length])


def test_files_that_were_replaced_are_not_written_to(main: MainEnd, part: ExpertStore, pieces: list[Keep]) -> None:
    file, _ = ExpertStore(part.path, part.manifest).locate(*GETS)
    shutil.copy(file, other := file.with_suffix(".other"))
    other.replace(file)
    before = file.read_bytes()
    assert "is another store than this worker opened" in asked(main, pieces[0])
    assert file.read_bytes() == before


def test_a_whole_store_takes_none(desk: WorkerDesk, blob: BlobOf) -> None:
    main = desk.welcome(desk.worker())
    assert "holds a whole store" in asked(main, Keep(1, *GETS, "", 0, blob(*GETS), True))


def test_a_list_that_does_not_change_is_not_read(
    main: MainEnd, desk: WorkerDesk, pieces: list[Keep], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = desk.workers[0]._part_watch
    watch.look()
    monkeypatch.setattr(watch, "_read", read := Mock(wraps=watch._read))
    watch.look()
    assert not read.called
    main.send(*pieces)
    assert [main.next() for _ in range(3)][::2] == [Kept(1), Kept(2)]
    assert read.call_count == 1


def test_what_others_have_listed_meanwhile_stays_and_what_they_have_dropped_comes_back(
    main: MainEnd, part: ExpertStore, pieces: list[Keep]
) -> None:
    other = ExpertId(0, 2)
    main.send(pieces[0])
    assert main.next() == Kept(1)
    (part.path / HELD).write_text(held_text([other]))
    main.send(pieces[1])
    assert [main.next() for _ in range(2)] == [Held(True, (0, 1, 2, 1, 3, 3)), Kept(2)]
    assert ExpertStore.open(part.path).held == {HAS, other, GETS}
