"""What a parameter is, declared beside the module that owns it: full shape, initial value, sharding, decay.

Initial values are drawn per parameter from (seed, name) in full shape and then sliced, so a model is the same model
under every layout. Padded rows or columns (vocabulary, GLU width) are zero.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Initializer = Callable[[torch.Generator, Tensor], Tensor]
WORTH_A_THREAD = 1_000_000  # values to draw


@dataclass(frozen=True)
class ParameterSpec:
    """Declaration of one parameter.

    Attributes:
        shape: full shape without padding, over all tensor-parallel ranks.
        fill: draws the full value into an fp32 tensor on the CPU, and returns that.
        partition_dim: dimension that tensor parallelism splits, or None when every rank holds all of it.
        decay: whether weight decay applies.
        keep_fp32: whether the parameter stays fp32 in a bf16 run (theta, TPE's decay rates).
        rate: factor on the learning rate.
        per_token: used token by token on the residual stream: where tensor-parallel ranks share the tokens there, each has
            a part of the gradient, and they are summed.
    """

    shape: tuple[int, ...]
    fill: Initializer
    partition_dim: int | None = None
    decay: bool = True
    keep_fp32: bool = False
    rate: float = 1.0
    per_token: bool = False

    def init(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        """An initial value, fp32 on the CPU."""
        return self.fill(generator, torch.empty(shape, dtype=torch.float32))


def declare(parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
    """Attach a declaration; the attribute ``tensor_model_parallel`` is what DeepSpeed's gradient norm looks at."""
    parameter.spec = spec
    if spec.partition_dim is not None:
        parameter.tensor_model_parallel = True
    return parameter


def spec_of(parameter: Tensor) -> ParameterSpec:
    """The declaration of a parameter."""
    return cast(ParameterSpec, parameter.spec)


def normal(std: float) -> Initializer:
    """Normal with the given standard deviation."""
    return lambda generator, full: full.normal_(0.0, std, generator=generator)


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda generator, full: full.fill_(value)


def shard(full: Tensor, spec: ParameterSpec, local_shape: tuple[int, ...], rank: int) -> Tensor:
    """This tensor-parallel rank's part of a full unpadded tensor, zero where the padded shape exceeds it."""
    if spec.partition_dim is None:
        return full
    dim = spec.partition_dim
    size = local_shape[dim]
    start = min(rank * size, full.shape[dim])
    part = full.narrow(dim, start, min(size, full.shape[dim] - start))
    if part.shape[dim] == size:
        return part
    padded = full.new_zeros(local_shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def unshard(parts: list[Tensor], spec_shape: tuple[int, ...], partition_dim: int | None) -> Tensor:
    """The full unpadded tensor from every tensor-parallel rank's part, in rank order."""
    if partition_dim is None:
        return parts[0]
    return torch.cat(parts, dim=partition_dim).narrow(partition_dim, 0, spec_shape[partition_dim])


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Undrawn(TorchFunctionMode):
    """Modules built inside keep the memory of their parameters as it comes: :func:`initialize` sets them all.

    PyTorch's own layers would draw every weight first, for as long as that takes again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules built inside have shapes and no memory (device "meta"): PyTorch would "draw" those, too, by its compiler."""
    with torch.device("meta"), Undrawn():
        yield


class _Scratch(threading.local):
    """fp32 memory on the CPU to draw into, of each thread: fresh pages for every parameter cost as much as the drawing."""

    memory: Tensor | None = None

    def of(self, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        if self.memory is None or self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.float32, device="cpu")
        return self.memory[:size].view(shape)


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    tensor_rank: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    threads: int = 1,
) -> None:
    """Set every parameter of ``model`` from (seed, its name), whatever the layout.

    Args:
        device: where the parameters are to lie, None to leave them where they are.
        dtype: what they are to be, but for those that stay fp32; None for what they are.
        threads: that may draw at the same time, which changes no value.
    """
    # The longest first, so that threads end together.
    named = sorted(model.named_parameters(), key=lambda item: item[1].numel(), reverse=True)
    threads = min(threads, 1 + sum(parameter.numel() for _, parameter in named) // WORTH_A_THREAD)
    draw = partial(_draw, _Scratch(), seed, tensor_rank, device, dtype)
    if threads == 1:
        for name, parameter in named:
            draw(name, parameter)
        return
    card = device.index if device is not None and device.type == "cuda" else None
    # A thread begins at the first GPU, where this process may have no business.
    begin = None if card is None else partial(torch.cuda.set_device, card)
    with ThreadPoolExecutor(threads, "initial values", begin) as pool:
        for done in [pool.submit(draw, name, parameter) for name, parameter in named]:
            done.result()


@torch.no_grad()  # which holds in one thread alone
def _draw(
    scratch: _Scratch,
    seed: int,
    tensor_rank: int,
    device: torch.device | None,
    dtype: torch.dtype | None,
    name: str,
    parameter: nn.Parameter,
) -> None:
    spec, device = spec_of(parameter), device or parameter.device
    dtype = parameter.dtype if dtype is None or spec.keep_fp32 else dtype
    stays = parameter.device == device and parameter.dtype == dtype
    plain = device.type == "cpu" and dtype == torch.float32 and parameter.is_contiguous()
    if stays and plain and parameter.shape == spec.shape:
        full = spec.fill(_generator(seed, name), parameter)
        if full is not parameter:  # a fill that makes a tensor of its own
            parameter.copy_(full)
        return
    full = spec.fill(_generator(seed, name), scratch.of(spec.shape))
    part = shard(full, spec, tuple(parameter.shape), tensor_rank)
    if stays:
        parameter.copy_(part)
    else:
        assert part.shape == parameter.shape, f"{name}: declared as {tuple(spec.shape)}, is {tuple(parameter.shape)}"
        parameter.data = part.to(device, dtype, copy=True)  # the memory that it had is given back untouched


def count_parameters(model: nn.Module) -> int:
    """Exact number of parameters of the whole model, padding not counted, tied weights once."""
    return sum(torch.Size(spec_of(p).shape).numel() for p in model.parameters())
