"""LightNet: pretraining of linear attention with additive decay. Importing this loads nothing heavy.

``LightNetConfig``, ``LightNetForCausalLM`` and the other classes for Hugging Face Transformers are imported when they are
first asked for, and registered with its Auto classes when these are.
"""

from typing import Any

from .registration import with_auto_classes

_HUGGING_FACE = (
    "LightNetCache",
    "LightNetConfig",
    "LightNetForCausalLM",
    "LightNetForImageClassification",
    "LightNetForMaskedLM",
    "LightNetForSequenceClassification",
    "LightNetModel",
)

__all__ = list(_HUGGING_FACE)


def __getattr__(name: str) -> Any:
    if name in _HUGGING_FACE:
        from . import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HUGGING_FACE])


with_auto_classes()
