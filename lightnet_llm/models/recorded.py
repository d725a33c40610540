"""Parts of models whose steps are recorded once and repeated (`lightnet_kernels.recorded`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightnet_kernels import recordable, recorded
from torch import Tensor, nn


def replayed(
    run: Callable[..., Any],
    modules: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    others: Sequence[Tensor],
    opaque: Sequence[Tensor | None],
    key: tuple[Any, ...],
    again: bool = False,
    decided: dict[Any, Any] | None = None,
) -> Any:
    """As `recorded`; None where it is to be run as it is.

    Args:
        run: a function of ``inputs`` and ``opaque`` that calls these modules.
        others: what it reads beside their parameters and buffers.
    """
    weights, kinds = [*others], [*key]
    if not recordable(inputs[0], decided) or not all(_gather(module, weights, kinds) for module in modules):
        return None
    return recorded(run, inputs, weights, opaque, tuple(kinds), again, decided)


def _gather(module: nn.Module, tensors: list[Tensor], kinds: list[Any]) -> bool:
    """Adds all parameters and buffers in order, and modules' types; false where a hook waits for a module's call."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    kinds.append(type(module))
    tensors += [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    return all(_gather(child, tensors, kinds) for child in module._modules.values() if child is not None)
