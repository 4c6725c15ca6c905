"""What cannot run is refused by name before anything is loaded or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import family as families
from checkpoint.sharding.source import open_source
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler import errors
from support.models.families import REFUSED
from support.models.store_making import shard


@pytest.mark.parametrize("refused", REFUSED)
def test_refused_before_anything_is_written(refused: str, tmp_path: Path, record_property: Any) -> None:
    from transformers import AutoConfig

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(AutoConfig.for_model(refused).to_dict(), default=str))
    save_file({"model.norm.weight": torch.ones(4)}, model / "model.safetensors")
    error, named = REFUSED[refused]
    with pytest.raises(error, match=named) as caught:
        shard(open_source(model), tmp_path / "store")
    assert type(caught.value) is error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    record_property("refused", f"{error.__name__}: {named}")


def test_a_cache_that_cannot_be_aligned_is_named_at_start(tiny_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of layer that a later Transformers might bring. Without KV alignment, or a shadow, the family runs."""
    tiny = tiny_of("jamba")
    with_another_kind(monkeypatch)
    loads: list[str] = []
    monkeypatch.setattr("main_node.node.load_dense", lambda *args: loads.append("dense"))
    with pytest.raises(errors.UnsupportedFamilyError, match=r"TomorrowsLayer.*--align-kv 0"):
        EmbeddedCluster(Settings(model="jamba", threads=1, workers=1), tiny.store)
    assert loads == []
    monkeypatch.undo()
    with_another_kind(monkeypatch)
    for changes in ({"align_kv": 0}, {"shadow": "none"}):
        EmbeddedCluster(Settings(model="jamba", threads=1, workers=1, **changes), tiny.store).close()


def with_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on new caches have layers for states of a name that we do not know."""
    new_cache = families.new_cache

    def changed(config: Any) -> Any:
        cache = new_cache(config)
        for layer in cache.layers:
            if type(layer).__name__ == "LinearAttentionLayer":
                layer.__class__ = type("TomorrowsLayer", (type(layer),), {})
        return cache

    monkeypatch.setattr(families, "new_cache", changed)


def test_a_family_with_a_cache_of_its_own_that_is_none_of_ours(tiny_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_of("mixtral").model.config
    cls = families.model_class(config)
    monkeypatch.setattr(cls, "_supports_default_dynamic_cache", classmethod(lambda _: False))
    with pytest.raises(errors.UnsupportedFamilyError, match="mixtral"):
        families.new_cache(config)


def test_experts_a_token_that_nobody_says(tiny_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The routers do not run without weights, and the configuration has no name that we know."""
    config = tiny_of("mixtral").model.config
    monkeypatch.setattr(families, "_routed_width", lambda said: None)
    assert families.shape_of(config, (0, 1), 8).top_k == 3
    monkeypatch.setattr(families, "_TOP_K_NAMES", ("experts_per_word",))
    with pytest.raises(errors.UnsupportedFamilyError, match="experts_per_word"):
        families.shape_of(config, (0, 1), 8)
