"""Makes ``lm_eval --model lightnet`` known to lm-eval, which looks for no plugins of its own (0.4.13).

PyTorch does: it calls the entry points of the group ``torch.backends`` when it is imported, which in lm-eval's program
is before a model is chosen. Elsewhere ``register`` returns at once. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off;
``python -m lightnet_eval`` then is lm-eval's program with the model in it.
"""

from __future__ import annotations

import sys


def register(always: bool = False) -> None:
    """Name the model in lm-eval's registry, where lm-eval is what imports PyTorch (or ``always``); loads nothing else."""
    if not always and "lm_eval" not in sys.modules:
        return
    try:
        import lm_eval.models  # noqa: F401  (first: it fills the registry only where that is empty)
        from lm_eval.api.registry import model_registry
    except Exception:  # another version, or one that is half imported: PyTorch must load all the same
        return
    if "lightnet" not in model_registry:
        model_registry.register("lightnet", target="lightnet_eval.language_model:LightNetLM")
