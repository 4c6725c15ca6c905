"""One cluster of the demo model without a shadow, its whole model by Transformers, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from main_node.drafting import Drafting
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.paths import DEMO


@pytest.fixture(scope="module")
def made(demo_store: Callable[[str], Any]) -> Iterator[Callable[..., EmbeddedCluster]]:
    """Makes clusters of the demo model, and closes them."""
    with ExitStack() as open_ones:

        def make(**more: Any) -> EmbeddedCluster:
            settings = Settings(
                model=str(DEMO), shadow="none", workers=2, threads=1, loader="memory", mini_batch=4096, **more
            )
            return open_ones.enter_context(closing(EmbeddedCluster(settings, demo_store("float32"))))

        yield make


@pytest.fixture(scope="module")
def shared(made: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return made()


@pytest.fixture
def cluster(shared: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """Of the module, as it was made."""
    yield shared
    shared.main.on_logits = None
    shared.main.drafting = Drafting(None)


@pytest.fixture(scope="module")
def whole() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, experts_implementation="eager")
