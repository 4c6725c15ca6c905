"""Keeps HQQ, and torch's compiler with it, out of the start of a process.

Wherever hqq is installed, `transformers.cache_utils` imports its Quantizer, for a quantised KV cache that this project
does not use. That import takes as long as torch's own.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_IMPORTER = "transformers.cache_utils"
_POSTPONED = "hqq.core.quantize"


def postpone_hqq() -> None:
    """Let Transformers import HQQ at the first use of its Quantizer. Call it before Transformers' models are imported;
    afterwards, and without hqq, it has no effect. A second call does nothing.

    Only the import statements of `transformers.cache_utils` are changed, through the `__import__` that this one module
    sees. Nothing shared is changed, not even for a moment: `sys.modules` has no stand-in for hqq and
    `is_hqq_available` keeps its answer. So threads may import Transformers and hqq at the same time, every other
    import of hqq gets the real one, and so does Transformers' HQQ cache when it quantises.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Quantizer:
    """Stands for HQQ's class of this name, and imports it when one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        from hqq.core.quantize import Quantizer

        return getattr(Quantizer, name)


class _Postponed(ModuleType):
    Quantizer = _Quantizer()


_STAND_IN = _Postponed(_POSTPONED)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """As `builtins.__import__`, except for `from hqq.core.quantize import Quantizer`."""
    if name == _POSTPONED and tuple(fromlist or ()) == ("Quantizer",):
        return _STAND_IN
    return builtins.__import__(name, globals, locals, fromlist or (), level)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module whose imports are changed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _IMPORTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None  # installed in a way that is not known here: imported as always
        spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        # Python looks up `__import__` in the builtins of the module that the statement is in.
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
        super().exec_module(module)
        vars(module)["__builtins__"] = vars(builtins)
