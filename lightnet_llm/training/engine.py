"""DeepSpeed engines behind one small interface: a step, a validation, a checkpoint.

The plain engine serves ZeRO 0 to 3; the pipeline engine serves PP > 1. Both train the same parts under the same
parameter names.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import clip_grad_norm_
from lightnet_kernels import compile_ahead
from torch import Tensor, nn

from ..checkpoint.native import OPTIMIZER_NAMES
from ..checkpoint.restore import restore
from ..checkpoint.universal import UniversalForm
from ..checkpoint.weights import load_into, load_weights
from ..config.deepspeed import NO_CLIP, deepspeed_config, effective_zero_stage
from ..config.run import RunConfig
from ..launch.host import threads
from ..models import build_model
from ..models.block import Block
from ..models.layers import PlainLayers
from ..models.parameters import Undrawn, initialize, spec_of
from ..parallel.clock import Clock
from ..parallel.layout import Groups
from ..parallel.megatron import MegatronLayers
from ..parallel.sequence import SequencePlace
from ..parallel.stage_times import choose_stages
from .bad_steps import Guard, Judge, Verdict
from .norms import group_norms, reduce_norm_once
from .optimizer import build_optimizer
from .progress import Progress
from .tasks import Batch, task_of


@contextmanager
def _fp32_parameters_kept() -> Iterator[None]:
    """DeepSpeed casts every parameter to bf16; theta and TPE's decay rates must stay fp32 (model-spec section 2)."""
    original = DeepSpeedEngine._cast_module_mixed_precision

    def cast(self: Any, *args: Any, **kwargs: Any) -> None:
        kept = [(p, p.data) for p in self.module.parameters() if spec_of(p).keep_fp32]
        original(self, *args, **kwargs)
        for parameter, data in kept:
            parameter.data = data

    DeepSpeedEngine._cast_module_mixed_precision = cast
    try:
        yield
    finally:
        DeepSpeedEngine._cast_module_mixed_precision = original


@contextmanager
def _modules_not_collected() -> Iterator[None]:
    """DeepSpeed collects garbage six times while it is built, and each time all that was imported is looked through."""
    if gc.get_freeze_count():  # they are passed over already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _own_threads() -> int:
    """This rank's share of the host's cores, for work that is done before the device has any."""
    ranks = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")  # DeepSpeed's launcher; torchrun
    return threads(int(ranks or dist.get_world_size()), gpus=False)


def build_layers(groups: Groups, share_tokens: bool = False) -> PlainLayers:
    """megatron-core's layers under tensor parallelism, plain torch otherwise."""
    if groups.layout.tensor == 1:
        return PlainLayers()
    return MegatronLayers(groups.tensor_group, share_tokens=share_tokens)


class Engine:
    """A model, its optimiser and its ranks under DeepSpeed (plain engine).

    Args:
        config: the run.
        groups: ranks and process groups.
        device: this rank's device.
        weights: checkpoint folder whose weights replace the drawn initial values.
        stages: bounds of the pipeline's stages, None to choose them; afterwards an attribute (empty without a pipeline).

    Attributes:
        measure_groups: whether the next step measures gradient and weight norms by kind of parameter.
        group_norms: what was measured last.
        compiled: whether the kernels are that a step needs, as far as that can be done before it.
        last_batch: the micro-batch worked on last, for a report after running out of memory.
        task: what the head adds.
        batch_checksum: of the sample ids and contents this rank read for the last step.
        judge, guard: what decides that an update is skipped, and what it decided.
        samples_read: sample ids of the step's micro-batches, as read on this rank.
        losses: their mean losses, where this rank computes them.
        progress: told what this rank is doing.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        device: torch.device,
        weights: Path | None = None,
        stages: list[int] | None = None,
    ):
        self.config, self.groups, self.device = config, groups, device
        self.stages = stages or []
        self.measure_groups = False
        self.compiled = False
        self.group_norms: dict[str, dict[str, float]] | None = None
        self.last_batch: Batch | None = None
        self.batch_checksum = 0
        self.progress = Progress()
        self.samples_read: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.task = task_of(config)
        place = self._place()
        weight = 1.0 if place is None else self.task.loss_weight(place)
        self.layers = build_layers(groups, config.parallel.tensor_sequence_parallel)
        self.clock = Clock(config.train.seed, None, place, weight, self.layers.token_shard)
        model = self._build_model()
        every = config.parallel.recompute_every
        for block in model.modules():
            if isinstance(block, Block):
                block.recompute = every > 0 and block.index % every == 0
        # As DeepSpeed is going to cast and move them, which takes longer a second time.
        narrow = torch.bfloat16 if config.train.precision == "bf16" and self.zero_stage < 3 else None
        initialize(model, config.train.seed, self.layers.tensor_rank, device, narrow, _own_threads())
        if weights is not None:
            load_into(model, load_weights(weights), str(weights), self.layers.tensor_rank)
        self.layers.sum_shared_gradients(model)
        with _fp32_parameters_kept(), _modules_not_collected():
            self.engine, self.optimizer, *_ = deepspeed.initialize(
                model=model,
                optimizer=build_optimizer(model, config.optimizer, config.train.ema),
                config=deepspeed_config(config, groups.layout.data, groups.layout.sequence),
                mpu=self._mpu(),
                dist_init_required=False,
            )
        if self.zero_stage == 0:
            self.engine.clip_fp32_gradients = self._clip_and_keep_norm
        if groups.layout.pipeline > 1:
            reduce_norm_once(self.engine.optimizer)
        self.judge = Judge(config.bad_steps)
        self.guard = Guard(self.engine, self.judge, self._loss_share, self._verdict)
        self._step_alone = self.engine._take_model_step
        self.engine._take_model_step = self._measure_then_step
        self.base_rates = [float(group["lr"]) for group in self.param_groups]

    def _place(self) -> SequencePlace | None:
        """This rank among those that share each row, with the run's way to exchange states."""
        parallel = self.config.parallel
        in_flight = torch.bfloat16 if parallel.sequence_exchange_dtype == "bf16" else torch.float32
        return self.groups.sequence and self.groups.sequence.using(parallel.sequence_exchange, in_flight)

    def _build_model(self) -> nn.Module:
        with Undrawn():
            return build_model(self.config.model, self.layers)

    def _mpu(self) -> Any:
        return self.groups

    @property
    def module(self) -> Any:
        """The model whose parameters carry the project's names."""
        return self.engine.module

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups, whatever wraps it."""
        return self.engine.optimizer.param_groups

    @property
    def zero_stage(self) -> int:
        """The stage DeepSpeed runs."""
        return effective_zero_stage(self.config)

    def _clip_and_keep_norm(self) -> None:
        """Without ZeRO, DeepSpeed clips by its own function and forgets the norm."""
        self.engine._global_grad_norm = clip_grad_norm_(
            parameters=self.module.parameters(), max_norm=self.engine.gradient_clipping(), mpu=self.engine.mpu
        )

    def _measure_then_step(self, *args: Any, **kwargs: Any) -> None:
        """Runs where gradients are reduced and not yet used, in both engines."""
        self.progress.note("gradient norm and update")
        self.group_norms = group_norms(self.module, self.groups) if self.measure_groups else None
        self._step_alone(*args, **kwargs)
        self.guard.after_step()

    def _loss_share(self) -> Tensor:
        """This rank's part of the step's mean loss, see :class:`Guard`."""
        return torch.stack(self.losses).mean() / dist.get_world_size()

    def _verdict(self) -> Verdict:
        assert self.clock.step is not None
        return Verdict(self.clock.step, self.losses, self.samples_read)

    def set_rate(self, factor: float) -> float:
        """Set every group's learning rate to ``factor`` times its base; returns the rate of the first."""
        for group, base in zip(self.param_groups, self.base_rates, strict=True):
            group["lr"] = base * factor
        return float(self.param_groups[0]["lr"])

    def _read(self, batches: Iterator[Batch]) -> Batch:
        """The next micro-batch; what was read is summed up, so that two runs can be seen to read the same."""
        index = len(self.samples_read)
        self.progress.note(f"reading micro-batch {index}")
        batch = next(batches)
        self.progress.note(f"forward of micro-batch {index}")
        self.last_batch = batch
        self.samples_read.append(batch["sample_ids"])
        self.batch_checksum += self.task.checksum(batch)
        return batch

    def _loss(self, batch: Batch) -> Tensor:
        return self.task.loss(self.engine, batch, self.clock, self.module.training)

    def _compile_once(self, batch: Batch) -> None:
        """Before the first step, all its kernels; not where ranks exchange something within a pass, nor where what is computed
        decides what is done (the exact form of independent decay)."""
        layout, first = self.groups.layout, not self.compiled
        self.compiled = True
        alone = layout.tensor == layout.sequence == 1 and self.zero_stage < 3
        if first and alone and self.config.model.decay != "independent":
            forward = self.module.forward  # without DeepSpeed's hooks: its timers expect a forward pass to end
            self.progress.note("compiling kernels")
            compile_ahead(lambda: self.task.loss(forward, batch, self.clock, True), list(self.module.parameters()))
            self.progress.note("forward of micro-batch 0")

    def _micro_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The step's micro-batches. Where not every label counts, all are read first, and the mean of their losses is made
        one over the labels of the whole step: a mean of means would weigh a label by how few others are beside it."""
        count = self.engine.gradient_accumulation_steps()
        if not self.task.reads_ahead:
            for _ in range(count):
                yield self._read(batches)
            return
        held = [self._read(batches) for _ in range(count)]
        labels = [self.task.labels(batch) for batch in held]
        total = torch.stack([(x >= 0).sum() for x in labels]).sum().to(self.device, torch.float64)
        dist.all_reduce(total, group=self.groups.data_group)
        share = count * self.groups.data_size / max(float(total), 1.0)  # without any label all losses are 0
        for index, batch in enumerate(held):
            self.clock.step_weight = labels[index].numel() * share
            self.progress.note(f"forward of micro-batch {index}")
            yield batch

    def _set_batch(self, samples: int) -> None:
        """DeepSpeed counts sequence-parallel ranks as data-parallel ones, and so each sample once a rank."""
        counted = samples * self.groups.layout.sequence
        if self.engine.train_batch_size() != counted:
            self.engine.set_train_batch_size(counted)

    def _begin(self, step: int) -> None:
        self.clock.step, self.clock.step_weight, self.batch_checksum = step, 1.0, 0
        self.samples_read, self.losses = [], []

    def train_step(self, batches: Iterator[Batch], step: int, global_batch: int) -> Tensor:
        """One optimiser step.

        Args:
            batches: this rank's micro-batches, in order.
            step: number of the update, from 0.
            global_batch: samples of the step over all ranks.

        Returns:
            This rank's mean loss in nats over its micro-batches, a scalar on the device (see :meth:`reduce_mean`).
        """
        if not self.module.training:  # goes through all modules
            self.engine.train()
        self._begin(step)
        self._set_batch(global_batch)
        micro_batches = self.engine.gradient_accumulation_steps()
        for index, batch in enumerate(self._micro_batches(batches)):
            batch = self.task.to_device(batch, self.device)
            self._compile_once(batch)
            loss = self._loss(batch)
            self.losses.append(loss.detach())
            self.progress.note(f"backward of micro-batch {index}")
            self.engine.set_gradient_accumulation_boundary(index == micro_batches - 1)
            self.engine.backward(loss)
            self.engine.step()
        return torch.stack(self.losses).sum() / micro_batches

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], micro_batches: int) -> Tensor:
        """Means over ``micro_batches`` of the task's figures, averaged over data-parallel ranks, on every rank."""
        self.engine.eval()
        self.clock.step_weight = 1.0
        found = []
        for _ in range(micro_batches):
            self.progress.begin("validation")
            batch = self.task.to_device(next(batches), self.device)
            found.append(self.task.figures(self.engine, batch, self.clock))
        return self.reduce_mean(torch.stack(found).sum(0) / micro_batches)

    def reduce_mean(self, value: Tensor) -> Tensor:
        """Average over data-parallel ranks."""
        dist.all_reduce(value, group=self.groups.data_group)
        return value / self.groups.data_size

    def gradient_norm(self) -> float:
        """Global gradient norm of the last step, before clipping."""
        return self.guard.settle().norm

    def save(self, folder: Path, client_state: dict[str, Any], write: Callable[[Any, Path], None]) -> None:
        """DeepSpeed's native files under ``folder/engine``; every rank calls it.

        Args:
            client_state: what DeepSpeed keeps beside its own.
            write: writes an object to a path, now or later. It must not raise: other ranks wait at DeepSpeed's barrier.
        """
        if self.zero_stage == 0:
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            order = [names[parameter] for group in self.param_groups for parameter in group["params"]]
            client_state = {**client_state, OPTIMIZER_NAMES: order}
        writer = self.engine.checkpoint_engine
        original = writer.save
        writer.save = lambda state_dict, path: write(state_dict, Path(path))
        # The recovery script that DeepSpeed would copy fails on pipeline checkpoints; ``weights/`` serves instead.
        self.engine._copy_recovery_script = lambda path: None
        try:
            self.engine.save_checkpoint(str(folder), tag="engine", client_state=client_state, save_latest=False)
        finally:
            writer.save = original

    def load(self, folder: Path) -> None:
        """Restore weights and optimiser from ``folder/engine``, written by this layout."""
        path, _ = self.engine.load_checkpoint(str(folder), tag="engine")
        if path is None:
            raise RuntimeError(f"{folder}: DeepSpeed loaded nothing")
        if hasattr(self.engine.optimizer, "clip_grad"):  # it takes the saved run's
            self.engine.optimizer.clip_grad = self.engine.gradient_clipping()

    def load_universal(self, folder: Path, step: int, samples: int) -> None:
        """Restore weights and optimiser from a universal form, whatever layout it was made from.

        Args:
            folder: ``.../universal``.
            step, samples: where the run stands, for DeepSpeed's own counts.
        """
        restore(self.engine, self.zero_stage, UniversalForm(folder, self.layers.tensor_rank))
        self.engine.global_steps = step
        self.engine.global_samples = samples * self.groups.layout.sequence

    @property
    def clip(self) -> float:
        """Gradient-norm clip in force, infinite when off."""
        clip = self.engine.gradient_clipping()
        return float("inf") if clip >= NO_CLIP else float(clip)


class PipelineEngine(Engine):
    """The same over pipeline stages."""

    def _build_model(self) -> nn.Module:
        if not self.stages:
            self.stages = choose_stages(self.config, self.layers, self.clock, self.device)
        with Undrawn():
            return self.task.pipelined()(self.config.model, self.layers, self.groups, self.clock, self.stages)

    def _mpu(self) -> Any:
        return None  # a PipelineModule carries its own topology

    def _payloads(self, batches: Iterator[Batch]) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        for batch in batches:
            yield self.task.payload(self.task.to_device(batch, self.device), self.clock)

    def train_step(self, batches: Iterator[Batch], step: int, global_batch: int) -> Tensor:
        """One optimiser step through the pipeline; the loss is already averaged over all ranks."""
        self._begin(step)
        self.module.train()
        self._set_batch(global_batch)
        loss = self.engine.train_batch(self._payloads(self._micro_batches(batches))).detach().float()
        self.losses += [loss.detach() for loss in self.engine.fwd_outputs]  # none but on the last stage
        return loss

    def _loss_share(self) -> Tensor:
        if not self.engine.is_last_stage():
            return torch.zeros((), device=self.device)
        ranks = dist.get_world_size() // self.groups.layout.pipeline
        return self.engine.total_loss / (self.engine.gradient_accumulation_steps() * ranks)

    def evaluate(self, batches: Iterator[Batch], micro_batches: int) -> Tensor:
        """As the plain engine's."""
        self.clock.step, self.clock.step_weight = None, 1.0
        self.progress.begin("validation")
        self.module.eval()
        loss = self.engine.eval_batch(
            self._payloads(batches), compute_loss=True, reduce_output="avg", num_micro_batches=micro_batches
        )
        self.module.train()
        return torch.cat([loss.detach().float().reshape(1), self._further_figures(micro_batches)])

    def _further_figures(self, micro_batches: int) -> Tensor:
        """What the last stage found beside the loss, averaged as that is, on every rank."""
        found, self.module.figures = self.module.figures, []
        shape = [torch.zeros(0)] * dist.get_world_size()
        dist.all_gather_object(shape, torch.stack(found).sum(0).cpu() if found else torch.zeros(0))
        means = [x for x in shape if x.numel()]  # every rank of the last stage has its own
        return (torch.stack(means).mean(0) / micro_batches if means else torch.zeros(0)).to(self.device)

    def reduce_mean(self, value: Tensor) -> Tensor:
        """DeepSpeed's pipeline has averaged it already."""
        return value


def build_engine(
    config: RunConfig,
    groups: Groups,
    device: torch.device,
    weights: Path | None = None,
    stages: list[int] | None = None,
) -> Engine:
    """The engine that ``config.parallel`` asks for; arguments as of :class:`Engine`."""
    return (PipelineEngine if groups.layout.pipeline > 1 else Engine)(config, groups, device, weights, stages)
