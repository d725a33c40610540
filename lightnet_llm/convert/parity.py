"""The gate at the end of every conversion: logits of source and result on real text, which images are drawn of, too.

Both are computed in fp32, block by block, so that a model larger than memory passes, too.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config.model import ModelConfig
from ..models import build_model
from ..models.backbone import at_grid, embed_grid
from ..models.classifier import classify
from ..models.context import ForwardContext
from ..models.layers import PlainLayers
from ..models.parameters import shapes_alone
from ..models.sequence_classifier import mean_of_tokens
from .tokenizer import Vocabulary

TOLERANCE = 1e-5  # of the largest logit
TOKENS = 256
IMAGES = 2
HIDDEN = 6  # every so many tokens a masked model is given its mask
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


def real_inputs(model: ModelConfig, vocabulary: Vocabulary | None, mask: int | None = None) -> Tensor:
    """What a model of any head is given: token ids [1, N], or images [2, C, H, W] of the size in training.

    Args:
        mask: a masked language model's mask token, which then stands in some places.
    """
    if model.image is not None:
        high, wide = model.image.size
        count = IMAGES * model.image.channels * high * wide
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        pixels = torch.tensor(list((text * (1 + count // len(text)))[:count]), dtype=torch.float32)
        return (pixels.view(IMAGES, model.image.channels, high, wide) - 96.0) / 32.0
    ids = real_text(model, vocabulary)
    if mask is not None:
        ids[:, ::HIDDEN] = mask
    return ids


@torch.inference_mode()
def logits(model: ModelConfig, read: Read, inputs: Tensor) -> Tensor:
    """fp32 logits [B, N, vocabulary] or [B, classes] of training's model; each tensor is read when its turn comes, and dropped.

    Args:
        read: gives full tensors by training's names, of any dtype.
        inputs: as of :func:`real_inputs`.
    """
    layers = PlainLayers(vocab_multiple=1)
    with shapes_alone():
        built: Any = build_model(model, layers)
    context = ForwardContext()
    with _filled(built, "embedding.", read):
        hidden = built.embedding(inputs)
    with _filled(built, "tpe.", read):
        if model.image is not None:
            grid = built.embedding.grid(inputs)
            hidden = embed_grid(hidden, built.tpe, model, grid, context)
            context = at_grid(context, grid, 0, hidden.device)
        elif built.tpe is not None:
            hidden, _ = built.tpe(hidden, context)
    for index, block in enumerate(built.layers):
        with _filled(built, f"layers.{index}.", read):
            hidden, _ = block(hidden, context)
    with _filled(built, "norm.", read), _filled(built, "embedding." if built.head is None else "head.", read):
        if model.head == "classifier":
            return classify(built.norm(hidden), built.head, context)
        if model.head == "sequence_classifier":
            found: Tensor = built.head(mean_of_tokens(built.norm(hidden), None), context)
            return found
        scores: Tensor = built.logits(hidden)
        return scores


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
