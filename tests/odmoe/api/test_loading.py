"""What `odmoe.load` does to its process, and takes back: nodes, threads of torch, files, what is called at the end."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import odmoe
from odmoe.api.model import Model, OpenedModel, start_model
from odmoe.clusters.threads import SharedThreads
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import ClusterError, ConfigError, PromptError


class Nodes:
    """A cluster that has started: what `load` asks of it before the first answer."""

    def __init__(self, settings: Any, store: Any, say: Any) -> None:
        self.settings = settings
        self.closed = 0
        self.failure: Exception | None = None
        torch.set_num_threads(settings.threads_a_node)

    def serves(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return self.settings

    def recording(self) -> bytes:
        raise ClusterError("the nodes keep no record")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Nodes]:
    """The clusters that were started."""
    found: list[Nodes] = []

    def start(*given: Any) -> Nodes:
        found.append(Nodes(*given))
        return found[-1]

    monkeypatch.setattr("odmoe.api.model.start_cluster", start)
    monkeypatch.setattr("odmoe.clusters.threads.SHARED_THREADS", SharedThreads())
    return found


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What of models would be called at the interpreter's end."""
    found: list[Callable[[], None]] = []
    register = atexit.register

    def note(call: Any, *given: Any, **more: Any) -> Any:
        if isinstance(getattr(call, "__self__", None), Model):
            found.append(call)
            return call
        return register(call, *given, **more)  # of a library that is imported just now

    monkeypatch.setattr(atexit, "register", note)
    monkeypatch.setattr(atexit, "unregister", found.remove)
    return found


def test_nodes_that_started_stop_where_the_load_fails_after_it(
    demo: Path, made: list[Nodes], at_exit: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nodes, "serves", lambda self: (_ for _ in ()).throw(ClusterError("the main node is gone")))
    before = torch.get_num_threads()
    with pytest.raises(ClusterError, match="the main node is gone"):
        odmoe.load(demo, shadow="none", threads=before + 1)
    assert [one.closed for one in made] == [1]
    assert at_exit == []
    assert torch.get_num_threads() == before


def test_a_record_that_cannot_be_written_leaves_nothing_behind(
    demo: Path, made: list[Nodes], at_exit: list[Any], tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    model = odmoe.load(demo, shadow="none", threads=before + 1, record=tmp_path / "record")
    assert at_exit == [model.close]
    with pytest.raises(ClusterError, match="keep no record"):
        model.close()
    model.close()
    assert [one.closed for one in made] == [1]
    assert at_exit == []
    assert torch.get_num_threads() == before


def test_models_that_are_open_share_their_number_of_threads(demo: Path, made: list[Nodes]) -> None:
    before = torch.get_num_threads()
    first = odmoe.load(demo, shadow="none", threads=before + 2)
    with pytest.raises(ConfigError, match=f"^threads is {before + 1}, .* computes with {before + 2}"):
        odmoe.load(demo, shadow="none", threads=before + 1)
    second = odmoe.load(demo, shadow="none")
    same = odmoe.load(demo, shadow="none", threads=before + 2)
    assert [one.settings.threads_a_node for one in made] == [before + 2] * 3
    first.close()
    same.close()
    assert torch.get_num_threads() == before + 2
    second.close()
    assert torch.get_num_threads() == before
    with odmoe.load(demo, shadow="none", threads=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_settings_may_be_paths(demo: Path, made: list[Nodes], demo_store: Callable[[str], Any]) -> None:
    with odmoe.load(demo_store("float32").path, shadow="none", threads=1) as model:
        assert model.opened.store.manifest.dtype == "float32"


def test_who_looks_at_the_model_first_may_refuse_it(
    demo: Path, made: list[Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a node is started for it; nodes that ran are left."""
    looked: list[OpenedModel] = []

    def refuse(opened: OpenedModel) -> None:
        looked.append(opened)
        raise PromptError("the prompt is empty")

    settings = Settings(model=str(demo), shadow="none", threads=1)
    with pytest.raises(PromptError):
        start_model(settings, Terminal(quiet=True), refuse)
    assert made == []
    joined = Nodes(settings, None, None)
    monkeypatch.setattr("odmoe.api.model.join_model", lambda *given: Model(looked[0], cast("Any", joined)))
    with pytest.raises(PromptError):
        start_model(Settings(cluster="auto"), Terminal(quiet=True), refuse)
    assert (len(looked), joined.closed) == (2, 1)
