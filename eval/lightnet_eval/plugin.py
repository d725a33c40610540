"""Makes ``lm_eval --model lightnet`` known to lm-eval, which looks for no plugins of its own (0.4.13), and LightNet to
Transformers' Auto classes, as neither does.

PyTorch does: it calls the entry points of the group ``torch.backends`` when it is imported, which in lm-eval's program
is before a model is chosen. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off; ``python -m lightnet_eval`` then is lm-eval's
program with the model in it, and ``import lightnet_llm`` registers the others.
"""

from __future__ import annotations

import sys
from contextlib import suppress


def register(always: bool = False) -> None:
    """Name the model in lm-eval's registry, where lm-eval is what imports PyTorch (or ``always``), and in Transformers' when
    its Auto classes are imported; loads nothing else."""
    with suppress(ImportError):  # PyTorch must load all the same
        import lightnet_llm  # noqa: F401
    if not always and "lm_eval" not in sys.modules:
        return
    try:
        import lm_eval.models  # noqa: F401  (first: it fills the registry only where that is empty)
        from lm_eval.api.registry import model_registry
    except Exception:  # another version, or one that is half imported: PyTorch must load all the same
        return
    if "lightnet" not in model_registry:
        model_registry.register("lightnet", target="lightnet_eval.language_model:LightNetLM")
