"""How a model is cut into pipeline stages, and what each rank holds of it: known without any ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from torch import Tensor, nn

from ..config.model import ModelConfig
from ..models import build_model
from ..models.layers import PlainLayers
from ..models.parameters import shapes_alone


class PartLayers(PlainLayers):
    """Layers in the shapes of one tensor-parallel rank, without the others: for counting, not for computing."""

    def __init__(self, tensor_parallel: int, vocab_multiple: int = 128):
        super().__init__(vocab_multiple)
        self.tensor_parallel = tensor_parallel

    def _column(self, in_features: int, out_features: int) -> nn.Module:
        return nn.Linear(in_features, out_features // self.tensor_parallel, bias=False)

    def _row(self, in_features: int, out_features: int) -> nn.Module:
        return nn.Linear(in_features // self.tensor_parallel, out_features, bias=False)

    def _embedding(self, rows: int, width: int) -> nn.Module:
        return nn.Embedding(rows // self.tensor_parallel, width)

    def cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, reduction: str = "none"
    ) -> Tensor:
        """Over this rank's own rows."""
        return super().cross_entropy(hidden, weight, labels, min(vocab_size, len(weight)), reduction)


def units(config: ModelConfig) -> list[str]:
    """What stages are made of, in order; each is a prefix of parameters' names."""
    return ["embedding", "tpe", *(f"layers.{index}" for index in range(config.layers)), "norm", "head"]


def unit_parameters(config: ModelConfig, tensor_parallel: int) -> list[list[nn.Parameter]]:
    """Parameters of every unit on one tensor-parallel rank, without storage; a tied embedding is the head's as well."""
    return _unit_parameters(config.model_dump_json(), tensor_parallel)


@functools.lru_cache(maxsize=32)  # a plan asks for every layout
def _unit_parameters(text: str, tensor_parallel: int) -> list[list[nn.Parameter]]:
    config = ModelConfig.model_validate_json(text)
    with shapes_alone():
        model = build_model(config, PartLayers(tensor_parallel))
    held: dict[str, list[nn.Parameter]] = {unit: [] for unit in units(config)}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        held[unit if unit in held else "embedding"].append(parameter)  # a denoiser's time step and class
    if config.ties_head:
        held["head"] = held["embedding"]
    return list(held.values())


def counts(config: ModelConfig, tensor_parallel: int) -> list[int]:
    """Trained parameters of every unit on one tensor-parallel rank."""
    return [sum(p.numel() for p in held if p.requires_grad) for held in unit_parameters(config, tensor_parallel)]


def uniform(config: ModelConfig, stages: int) -> list[int]:
    """Bounds of stages with as many blocks each, as far as these divide; the ends of the model go with its first and last.

    Returns:
        stages + 1 indices into :func:`units`: stage i is units[bounds[i]:bounds[i + 1]].
    """
    each, more = divmod(config.layers, stages)
    bounds = [2]
    for stage in range(stages):
        bounds.append(bounds[-1] + each + (stage < more))
    return [0, *bounds[1:-1], config.layers + 4]


def balanced(weights: Sequence[int], stages: int) -> list[int]:
    """Bounds of stages whose sums of weights, one a unit, differ as little as can be; as of :func:`uniform`."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # at its import DeepSpeed warns where there is no accelerator
    try:
        from deepspeed.runtime.utils import partition_balanced
    finally:
        logging.disable(level)
    return [int(bound) for bound in partition_balanced(list(weights), stages)]


def describe(config: ModelConfig, bounds: Sequence[int], stage: int) -> str:
    """Units of a stage in words, such as ``embedding, tpe, layers 0-3``."""
    held = units(config)[bounds[stage] : bounds[stage + 1]]
    blocks = [int(unit.split(".")[1]) for unit in held if unit.startswith("layers.")]
    ends = [unit for unit in held if "." not in unit and (unit != "tpe" or config.tpe)]
    first = [unit for unit in ends if unit in ("embedding", "tpe")]
    span = f"layers {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"layer {blocks[0]}" if blocks else None
    return ", ".join([*first, *([span] if span else []), *(unit for unit in ends if unit not in first)])
