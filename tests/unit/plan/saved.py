"""Counts what autograd keeps, on tensors without storage, of the model as it runs with the Triton kernels."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lightnet_kernels  # noqa: F401  (its modules are looked up below)
import torch
from lightnet_kernels.companions import kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import CausalLM
from lightnet_llm.models.context import ForwardContext
from lightnet_llm.models.dropout import DropoutKey
from lightnet_llm.models.parameters import spec_of
from lightnet_llm.parallel.stages import PartLayers


class Saved:
    """Storages that are kept for the backward pass, each once, but for those of ``known``."""

    def __init__(self, known: list[Tensor]):
        self._known = {x.untyped_storage()._cdata for x in known}
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> "Saved":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self._hooks.__enter__()
        return self

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._known and x.numel():
            self._kept[storage._cdata] = storage  # held, so that its address is no other's
        return x

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())


class SharingLayers(PartLayers):
    """Shapes of a rank that shares the tokens outside its layers: gathers repeat, scatters cut."""

    def __init__(self, tensor_parallel: int):
        super().__init__(tensor_parallel)
        self.token_shard = (0, tensor_parallel)

    def enter(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.tensor_parallel, 1)

    def share_tokens(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // self.tensor_parallel].clone()

    def row(self, in_features: int, out_features: int, std: float) -> nn.Module:
        layer = super()._row(self.split(in_features) * self.tensor_parallel, out_features)
        return nn.Sequential(layer, _First(self.tensor_parallel))


class _First(nn.Module):
    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // self.parts].clone()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Operators choose their Triton form, and tensors have no storage."""

    def module(name: str) -> Any:
        return sys.modules[f"lightnet_kernels.{name}"]

    module("scan")._triton()
    kernels("triton_toeplitz")
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(module("scan"), "choose_backend", lambda *a, **k: "triton"))
        stack.enter_context(mock.patch.object(module("toeplitz"), "_choose_backend", lambda *a, **k: "triton"))
        for name in ("norms", "swiglu", "linear_cross_entropy"):
            stack.enter_context(mock.patch.object(module(name), "choose_triton", lambda *a, **k: True))
        yield


def of_model(
    config: ModelConfig,
    rows: int,
    length: int,
    dtype: torch.dtype,
    tensor: int = 1,
    shared: bool = False,
    every: int = 0,
    autocast: bool = False,
) -> int:
    """Bytes that a forward pass with loss keeps, parameters aside.

    Args:
        autocast: in bf16, and linear layers keep their weight itself, as DeepSpeed's stage 3 has them.
    """
    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu())
        if autocast:
            from deepspeed.runtime.zero.linear import zero3_linear_wrap

            stack.enter_context(mock.patch.object(nn.functional, "linear", zero3_linear_wrap))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        model = CausalLM(config, SharingLayers(tensor) if shared else PartLayers(tensor)).train()
        for block in model.layers:
            block.recompute = every > 0 and block.index % every == 0
        for parameter in model.parameters():
            if not hasattr(parameter, "spec") or not spec_of(parameter).keep_fp32:
                parameter.data = parameter.data.to(dtype)
        key = None
        if config.dropout:
            key = DropoutKey(1, 0, torch.arange(rows), length, shard=(0, tensor) if shared else (0, 1))
        ids = torch.zeros(rows, length, dtype=torch.int64)
        if shared:  # packed rows, which is what tokens are shared of
            ids = ids.view(1, -1)
        with Saved(list(model.parameters())) as saved:
            model(ids, ForwardContext(dropout=key), ids.clone())
        return saved.bytes
