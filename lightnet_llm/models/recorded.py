"""Parts of models whose steps are recorded once and repeated (`lightnet_kernels.recorded`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightnet_kernels import recordable, recorded
from torch import Tensor, nn

PACKAGES = (__package__, f"{__package__.rpartition('.')[0]}.parallel")  # whose modules do what their configuration says


def replayed(
    run: Callable[..., Any],
    modules: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    others: Sequence[Tensor],
    opaque: Sequence[Tensor | None],
    key: tuple[Any, ...],
    again: bool = False,
    decided: dict[Any, Any] | None = None,
    store: OrderedDict[Any, Any] | None = None,
) -> Any:
    """As `recorded`; None where it is to be run as it is.

    Args:
        run: a function of ``inputs`` and ``opaque`` that calls these modules.
        others: what it reads beside their parameters and buffers.
    """
    if decided is not None and decided.get(key) == "modules":
        return None
    weights, kinds = [*others], [*key]
    first = decided is None or key not in decided
    if (first and not recordable(inputs[0], decided)) or not all(_gather(x, weights, kinds) for x in modules):
        if decided is not None:
            decided[key] = "modules"
        return None
    if decided is not None:
        decided[key] = "recorded"
    return recorded(run, inputs, weights, opaque, tuple(kinds), again, decided, store)


def _gather(module: nn.Module, tensors: list[Tensor], kinds: list[Any]) -> bool:
    """Adds all parameters and buffers in order, and modules' types; false where a module may do something else than its
    configuration says: one from elsewhere (an adapter), a forward of its own, a hook that waits for its call."""
    own = type(module) is nn.Linear or type(module).__module__.rpartition(".")[0] in PACKAGES
    if not own or hooked(module):
        return False
    kinds.append(type(module))
    tensors += [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    return all(_gather(child, tensors, kinds) for child in module._modules.values() if child is not None)


def hooked(module: nn.Module) -> bool:
    """Whether something waits for the module's call, or takes its place (a forward of its own, as accelerate sets)."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    everywhere = torch.nn.modules.module
    return bool(
        hooks
        or "forward" in vars(module)
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )
