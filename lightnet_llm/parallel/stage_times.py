"""Which pipeline stages a run gets, by parameters, by blocks, or by the time that each part of the model takes here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config.run import RunConfig
from ..models.causal_lm import head_loss
from ..models.layers import PlainLayers
from ..models.parameters import initialize, spec_of
from . import stages
from .clock import Clock
from .pipeline import BlockStage, EmbeddingStage, NormStage, PositionStage

REPEATS = 3


def choose_stages(config: RunConfig, layers: PlainLayers, clock: Clock, device: torch.device) -> list[int]:
    """Bounds of the stages that ``parallel.pipeline_partition`` asks for, see :mod:`.stages`; every rank calls it."""
    parallel = config.parallel
    if parallel.pipeline_partition == "uniform":
        return stages.uniform(config.model, parallel.pipeline)
    if parallel.pipeline_partition == "parameters":
        return stages.balanced(stages.counts(config.model, parallel.tensor), parallel.pipeline)
    return stages.balanced(measure(config, layers, clock, device), parallel.pipeline)


def measure(config: RunConfig, layers: PlainLayers, clock: Clock, device: torch.device) -> list[int]:
    """Microseconds of a micro-batch's forward and backward pass in each of :func:`stages.units`, a mean over all ranks.

    Every kind of part is built and run once to warm up, then the fastest of a few runs counts; all blocks are taken to
    be alike, but for those that compute their activations twice. All ranks run the same parts at the same time, because
    tensor- and sequence-parallel ranks communicate within them.
    """
    model, every = config.model, config.parallel.recompute_every
    timer = _Timer(config, layers, clock, device)
    embedding, position = timer.of(EmbeddingStage), timer.of(PositionStage)
    norm, head = timer.of(NormStage), timer.of_head()
    block = timer.of(BlockStage, 0) if every != 1 else 0.0
    again = timer.of(BlockStage, 0, recompute=True) if every else 0.0
    blocks = [again if every and index % every == 0 else block for index in range(model.layers)]
    seconds = torch.tensor([embedding, position, *blocks, norm, head], device=device)
    dist.all_reduce(seconds)
    return [max(1, round(1e6 * value / dist.get_world_size())) for value in seconds.tolist()]


class _Timer:
    """Runs one part of the model on a micro-batch of the run's shape."""

    def __init__(self, config: RunConfig, layers: PlainLayers, clock: Clock, device: torch.device):
        self.config, self.layers, self.clock, self.device = config, layers, clock, device
        self.dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        rows, length = config.train.micro_batch, config.data.sequence_length
        width = length if clock.place is None else clock.place.width(length)
        self.tokens = rows * width
        self.bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        self.padded = torch.full((rows * length + 1,), rows * length, dtype=torch.int32)
        self.padded[: rows + 1] = self.bounds
        self.sample_ids = torch.arange(rows, device=device)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, config.model.vocab_size, (rows, width), generator=generator).to(device)

    def _prepared(self, module: nn.Module) -> nn.Module:
        initialize(module, 1, self.layers.tensor_rank)
        module.to(self.device)
        for parameter in module.parameters():
            if not spec_of(parameter).keep_fp32:
                parameter.data = parameter.data.to(self.dtype)
        return module.train()

    def _activations(self, whole: bool) -> Tensor:
        """[1, tokens, width], this rank's share of them unless ``whole``."""
        tokens = self.tokens if whole else self.tokens // self.layers.token_shard[1]
        return torch.ones(1, tokens, self.config.model.width, dtype=self.dtype, device=self.device, requires_grad=True)

    def of(self, kind: Any, *arguments: Any, recompute: bool = False) -> float:
        """Seconds of a stage of this kind."""
        stage = self._prepared(kind(self.config.model, self.layers, self.clock, *arguments))
        if recompute:
            stage.block.recompute = True

        def run() -> Tensor:
            given = self.ids if kind is EmbeddingStage else self._activations(whole=kind is PositionStage)
            return stage((given, self.sample_ids, self.padded))[0].float().sum()

        return self._seconds(run)

    def of_head(self) -> float:
        """Seconds of the head's product with the loss."""
        head = self._prepared(EmbeddingStage(self.config.model, self.layers, self.clock)).embedding
        vocab_size = self.config.model.vocab_size

        def run() -> Tensor:
            hidden = self._activations(whole=False)
            return head_loss(hidden, head.weight, nn.Identity(), self.layers, self.ids, vocab_size, "sum")

        return self._seconds(run)

    def _seconds(self, run: Callable[[], Tensor]) -> float:
        return min([self._once(run) for _ in range(1 + REPEATS)][1:])  # the first compiles

    def _once(self, run: Callable[[], Tensor]) -> float:
        self._wait()
        began = time.perf_counter()
        run().backward()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
