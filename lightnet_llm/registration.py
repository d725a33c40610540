"""LightNet in Transformers' Auto classes wherever this package is installed; Transformers has no plugins.

``import lightnet_llm`` calls this, and so does ``import torch`` (``lightnet_eval.plugin`` says how). Nothing is imported before
the Auto classes are: Transformers and its models take seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO = "transformers.models.auto.modeling_auto"


def with_auto_classes() -> None:
    """Register as soon as ``AutoModel`` and its like exist."""
    module = sys.modules.get(AUTO)
    if module is None:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    elif getattr(module.__spec__, "_initializing", False):  # it is what imports PyTorch
        module.__class__ = _Begun
    else:
        _register()


def _register() -> None:
    try:
        from . import hf  # noqa: F401
    except Exception:  # an older Transformers, say: it must serve other models all the same
        return


class _Finder(MetaPathFinder):
    """Steps aside when the module is asked for, and registers once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


class _Begun(ModuleType):
    """The module while it runs: the first that asks it for a class finds it as it was, and everything registered."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("AutoModel"):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _register()
        return ModuleType.__getattribute__(self, name)  # it may be one of these no more
