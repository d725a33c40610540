"""The gate at the end of every conversion: logits of source and result on real text.

Both are computed in fp32, block by block, so that a model larger than memory passes, too.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..config.model import ModelConfig
from ..models.causal_lm import CausalLM
from ..models.context import ForwardContext
from ..models.layers import PlainLayers
from .tokenizer import Vocabulary

TOLERANCE = 1e-5  # of the largest logit
TOKENS = 256
Read = Callable[[str], Tensor]


def real_text(model: ModelConfig, vocabulary: Vocabulary | None) -> Tensor:
    """Token ids [1, N] of English prose (Python's own help); without a tokenizer its bytes serve as ids."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))[: 8 * TOKENS]
    if vocabulary is None:
        ids = [byte % model.vocab_size for byte in text.encode()]
    else:
        ids = [vocabulary.tokenizer.eod_id, *vocabulary.tokenizer.encode(text)]
    return torch.tensor([ids[:TOKENS]])


@torch.inference_mode()
def logits(model: ModelConfig, read: Read, ids: Tensor) -> Tensor:
    """fp32 logits [1, N, vocabulary] of training's model; each tensor is read when its turn comes, and dropped.

    Args:
        read: gives full tensors by training's names, of any dtype.
    """
    layers = PlainLayers(vocab_multiple=1)
    with torch.device("meta"):
        built = CausalLM(model, layers)
    context = ForwardContext()
    with _filled(built, "embedding.", read):
        hidden = built.embedding(ids)
    if built.tpe is not None:
        with _filled(built, "tpe.", read):
            hidden, _ = built.tpe(hidden, context)
    for index, block in enumerate(built.layers):
        with _filled(built, f"layers.{index}.", read):
            hidden, _ = block(hidden, context)
    with _filled(built, "norm.", read), _filled(built, "embedding." if built.head is None else "head.", read):
        return built.logits(hidden)


@contextmanager
def _filled(model: nn.Module, prefix: str, read: Read) -> Iterator[None]:
    """The parameters under a prefix have values inside."""
    names = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    empty = {}
    for name in names:
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        empty[name] = getattr(owner, leaf)
        setattr(owner, leaf, nn.Parameter(read(name).float(), requires_grad=False))
    yield
    for name in names:
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], empty[name])


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of logits, in units of the largest logit (at least 1); inf where one is not finite."""
    if not bool(torch.isfinite(one).all()) or not bool(torch.isfinite(other).all()):
        return float("inf")
    scale = max(1.0, float(one.abs().max()))
    return float((one.double() - other.double()).abs().max()) / scale
