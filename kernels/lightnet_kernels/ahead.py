"""All kernels of a training step compiled at once, before it.

Triton and NVRTC compile a kernel when it is first started. The scan's operators compile theirs together, but a step has a dozen
operators, each of which would wait for its own.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import only_torch
from .companions import kernels, on_device, unsupported_device

GPU = "cuda"
log = logging.getLogger(__name__)


def compile_ahead(run: Callable[[], Tensor], weights: Sequence[Tensor]) -> bool:
    """Compile in threads what `run` and the backward pass of what it returns start of this package's kernels.

    Both are gone through once without starting those; PyTorch's own run, on whatever is in memory. Nothing changes but caches
    and PyTorch's peak of memory: no gradient is kept, and hooks that wait for gradients to be accumulated do not run. What
    fails here, for lack of memory maybe, is logged ("info") and left to the call that is meant. Does nothing where the weights
    are not on a GPU with Triton.

    Args:
        run: returns a scalar. It must not change anything, nor look at the values that it computes.
        weights: tensors whose gradients will be asked for.

    Returns:
        Whether all that was met is compiled.
    """
    wanted = [x for x in weights if x.requires_grad]
    if not wanted or wanted[0].device.type != GPU or only_torch():
        return False
    device, whole = wanted[0].device, True
    if unsupported_device("triton_norms", device.type, device.index) is not None:
        return False
    # Autograd in this thread, too: it is the one that starts nothing.
    with on_device(wanted[0]), torch.autograd.set_multithreading_enabled(False):
        try:
            with kernels("triton_launch").compile_only(device):
                torch.autograd.grad(run(), wanted, allow_unused=True)
        except Exception as error:
            log.info("kernels are compiled when they are met: %s: %s", type(error).__name__, str(error))
            whole = False
        if not whole:  # the rest of that backward pass, with all that it had saved, goes with this thread's next
            one = torch.ones((), requires_grad=True)
            torch.autograd.grad(one * 1, one)
            gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # gradients of all weights at once are not what a step holds
    return whole
