"""The set of layers that models are built from: here plain torch, for one process and for Hugging Face users.

``lightnet_llm.parallel.megatron`` offers the same interface over tensor-parallel ranks. A model asks for ``column``
layers (outputs split over ranks), ``row`` layers (inputs split, outputs summed) and calls ``enter`` once on what it feeds
to column layers; with one rank all of these are ordinary. Between a row layer and the next ``enter`` ranks may hold a
share of the tokens each (``share_tokens``): there a model works token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from lightnet_kernels import linear_cross_entropy
from torch import Tensor, nn
from torch.autograd import forward_ad

from .parameters import ParameterSpec, declare, normal
from .recorded import hooked


def padded_size(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


class _TwoProducts(torch.autograd.Function):
    """x A^T and x B^T. The two gradients of x are summed by the second product, not in a pass over memory of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad
        weights = (one, two) if wanted[0] else (None, None)
        ctx.save_for_backward(x if wanted[1] or wanted[2] else None, *weights)  # frozen weights hold no activations
        return F.linear(x, one), F.linear(x, two)

    @staticmethod
    def backward(ctx: Any, grad_one: Tensor, grad_two: Tensor) -> tuple[Tensor | None, ...]:
        x, one, two = ctx.saved_tensors
        shape, grad_x = grad_one.shape[:-1], None
        grads = [y.reshape(-1, y.shape[-1]) for y in (grad_one, grad_two)]
        with torch.autocast(grad_one.device.type, enabled=False):  # it casts mm, but no product in place
            if one is not None:
                grad_x = torch.mm(grads[0], one).addmm_(grads[1], two).view(*shape, one.shape[1])
            of_weights = [
                torch.mm(grad.t(), x.reshape(-1, x.shape[-1])) if wanted else None
                for grad, wanted in zip(grads, ctx.needs_input_grad[1:], strict=True)
            ]
        return grad_x, *of_weights


def _joins(layer: nn.Module, x: Tensor) -> bool:
    """Whether the output of a layer of products is just that, and nothing else looks at its call."""
    return (
        not hooked(layer)  # before the weight is looked at: ZeRO-3 then gathers it, with the module outside
        and layer.bias is None
        and type(layer.weight) is nn.Parameter
        and layer.weight.dtype == x.dtype
    )


def _transformed() -> bool:
    """Whether torch.func's transforms or forward-mode differentiation are at work, which PyTorch's own layers know."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class PlainLayers:
    """Layers of one process. Weights are declared with their sharding, so that any layout draws the same ones.

    Attributes:
        tensor_parallel: ranks that share each layer.
        tensor_rank: this process among them.
        token_shard: (rank, number of ranks) that share the tokens of the residual stream.
        group: their process group, None for one.
        products: kinds of layers whose output is the product with their weight, where they have no bias.
        recordings: of parts of models made of these layers (`lightnet_kernels.recorded`): None, those of the process, unless
            the steps are collectives of a group.
        vocab_multiple: the vocabulary is padded to a multiple of this.
    """

    tensor_parallel = 1
    tensor_rank = 0
    token_shard = (0, 1)
    group: Any = None
    products: tuple[type[nn.Module], ...] = (nn.Linear,)
    recordings: OrderedDict[Any, Any] | None = None

    def __init__(self, vocab_multiple: int = 128):
        self.vocab_multiple = vocab_multiple

    def split(self, size: int) -> int:
        """This rank's share of ``size`` features, padded up where the ranks do not divide it."""
        return padded_size(size, self.tensor_parallel) // self.tensor_parallel

    def enter(self, x: Tensor) -> Tensor:
        """Mark the input of column layers: whole tokens forward, sum over ranks backward."""
        return x

    def pair(self, x: Tensor, one: nn.Module, two: nn.Module) -> tuple[Tensor, Tensor]:
        """What two layers make of one input."""
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and type(x) is Tensor
        plain = plain and not _transformed() and not torch.is_autocast_enabled(x.device.type)
        if plain and type(one) in self.products and type(two) in self.products and _joins(one, x) and _joins(two, x):
            both: tuple[Tensor, Tensor] = _TwoProducts.apply(x, one.weight, two.weight)
            return both
        return one(x), two(x)

    def share_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of [B, N, width], which all ranks hold whole: all where ranks do not share them."""
        return x

    def sum_shared_gradients(self, model: nn.Module) -> None:
        """Have gradients summed of parameters that each rank applies to its share of the tokens."""

    def linear(self, in_features: int, out_features: int, std: float) -> nn.Module:
        """A linear layer without bias that every rank holds whole."""
        layer = nn.Linear(in_features, out_features, bias=False)
        declare(layer.weight, ParameterSpec((out_features, in_features), normal(std), per_token=True))
        return layer

    def column(self, in_features: int, out_features: int, std: float) -> nn.Module:
        """Linear without bias, [.., in] to [.., split(out)]."""
        layer = self._column(in_features, self.split(out_features) * self.tensor_parallel)
        declare(layer.weight, ParameterSpec((out_features, in_features), normal(std), partition_dim=0))
        return layer

    def row(self, in_features: int, out_features: int, std: float) -> nn.Module:
        """Linear without bias, [.., split(in)] to [.., out], summed over ranks."""
        layer = self._row(self.split(in_features) * self.tensor_parallel, out_features)
        declare(layer.weight, ParameterSpec((out_features, in_features), normal(std), partition_dim=1))
        return layer

    def embedding(self, vocab_size: int, width: int, std: float) -> nn.Module:
        """Token embedding [B, N] to [B, N, width]; rows beyond ``vocab_size`` are padding, zero for ever."""
        layer = self._embedding(padded_size(vocab_size, self.vocab_multiple * self.tensor_parallel), width)
        declare(layer.weight, ParameterSpec((vocab_size, width), normal(std), partition_dim=0))
        return layer

    def cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, reduction: str = "none"
    ) -> Tensor:
        """Negative log likelihood in nats under the head's product, fp32; all logits are never held.

        Args:
            hidden: [.., width], as column layers take it (see ``enter``).
            weight: [V, width] this rank's rows of the padded vocabulary; padded entries do not count.
            labels: [..] integer token ids, global; those below 0 do not count.
            reduction: "none", of the shape of ``labels``, or "sum", a scalar.
        """
        return linear_cross_entropy(
            hidden, weight, labels, vocab_size=vocab_size, group=self.group, reduction=reduction
        )

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[.., vocab_size] logits of the whole vocabulary without padding, on every rank."""
        return logits[..., :vocab_size]

    def _column(self, in_features: int, out_features: int) -> nn.Module:
        return nn.Linear(in_features, out_features, bias=False)

    def _row(self, in_features: int, out_features: int) -> nn.Module:
        return nn.Linear(in_features, out_features, bias=False)

    def _embedding(self, rows: int, width: int) -> nn.Module:
        return nn.Embedding(rows, width)
