"""What a parameter is, declared beside the module that owns it: full shape, initial value, sharding, decay.

Initial values are drawn per parameter from (seed, name) in full shape and then sliced, so a model is the same model
under every layout. Padded rows or columns (vocabulary, GLU width) are zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

Initializer = Callable[[torch.Generator, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class ParameterSpec:
    """Declaration of one parameter.

    Attributes:
        shape: full shape without padding, over all tensor-parallel ranks.
        init: draws the full fp32 value on the CPU.
        partition_dim: dimension that tensor parallelism splits, or None when every rank holds all of it.
        decay: whether weight decay applies.
        keep_fp32: whether the parameter stays fp32 in a bf16 run (theta, TPE's decay rates).
        rate: factor on the learning rate.
        per_token: used token by token on the residual stream: where tensor-parallel ranks share the tokens there, each has
            a part of the gradient, and they are summed.
    """

    shape: tuple[int, ...]
    init: Initializer
    partition_dim: int | None = None
    decay: bool = True
    keep_fp32: bool = False
    rate: float = 1.0
    per_token: bool = False


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
    return lambda generator, shape: torch.empty(shape).normal_(0.0, std, generator=generator)


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda generator, shape: torch.full(shape, value)


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


@torch.no_grad()
def initialize(model: nn.Module, seed: int, tensor_rank: int = 0) -> None:
    """Set every parameter of ``model`` from (seed, its name), whatever the layout."""
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter)
        full = spec.init(_generator(seed, name), spec.shape)
        parameter.copy_(shard(full, spec, tuple(parameter.shape), tensor_rank))


def count_parameters(model: nn.Module) -> int:
    """Exact number of parameters of the whole model, padding not counted, tied weights once."""
    return sum(torch.Size(spec_of(p).shape).numel() for p in model.parameters())
