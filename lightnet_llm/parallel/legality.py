"""Which layouts a run can have: refused before any work, with the nearest that would do (law 5 of a run)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..config.run import RunConfig, TrainConfig
from ..errors import UserError
from .layout import Layout

SHOWN = 3  # nearest layouts that an error names


@dataclass(frozen=True)
class Choice:
    """The fields of ``parallel`` that decide who holds what. Names are those of the fields."""

    tensor: int
    pipeline: int
    sequence: int
    zero_stage: int
    tensor_sequence_parallel: bool

    @property
    def model(self) -> int:
        """Ranks that hold one model."""
        return self.tensor * self.pipeline * self.sequence


def choice_of(config: RunConfig) -> Choice:
    """What the configuration asks for."""
    p = config.parallel
    return Choice(p.tensor, p.pipeline, p.sequence, p.zero_stage, p.tensor_sequence_parallel)


def problem(config: RunConfig, choice: Choice, world: int) -> str | None:
    """Why a choice cannot run on ``world`` ranks, or None. The rest of the run is as configured."""
    model, parallel, train, length = config.model, choice, config.train, config.data.sequence_length
    if world % choice.model:
        return (
            f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x sequence {parallel.sequence} = {choice.model} "
            f"does not divide {world} ranks"
        )
    if model.heads % parallel.tensor:
        return f"parallel.tensor {parallel.tensor} must divide model.heads {model.heads}"
    if parallel.pipeline > model.layers:
        return f"parallel.pipeline {parallel.pipeline} is more than model.layers {model.layers}"
    if parallel.pipeline > 1 and parallel.zero_stage != 1:
        return (
            f"parallel.zero_stage {parallel.zero_stage} cannot be combined with parallel.pipeline {parallel.pipeline}; "
            "the pipeline engine takes zero_stage: 1"
        )
    if parallel.pipeline > 1 and model.head == "denoiser":
        return f"parallel.pipeline {parallel.pipeline}: head: denoiser has no stages"
    if parallel.tensor_sequence_parallel and parallel.tensor > 1 and model.image is not None:
        return f"parallel.tensor_sequence_parallel shares rows of text; head: {model.head} has images"
    if parallel.sequence > length:
        return f"parallel.sequence {parallel.sequence} is more than data.sequence_length {length}: at most one rank a token"
    if parallel.sequence > 1 and model.axes > 1 and model.image is None:
        return f"parallel.sequence {parallel.sequence} shares one axis of tokens, model.axes is {model.axes}"
    if parallel.sequence > 1 and model.mixer == "softmax":
        return f"parallel.sequence {parallel.sequence} exchanges states, and model.mixer: softmax has none"
    if parallel.tensor_sequence_parallel and parallel.tensor > 1 and model.drop_path:
        return "parallel.tensor_sequence_parallel splits samples, which model.drop_path leaves out as a whole"
    tokens = train.micro_batch * -(-length // parallel.sequence)
    if parallel.tensor_sequence_parallel and tokens % parallel.tensor:
        return (
            f"parallel.tensor_sequence_parallel: parallel.tensor {parallel.tensor} must divide the {tokens} tokens that a "
            f"rank has of train.micro_batch {train.micro_batch}"
        )
    return batch_problem(train, world // choice.model)


def batch_problem(train: TrainConfig, data_parallel: int) -> str | None:
    """Why a batch size of the run does not fit ``data_parallel`` ranks that read different samples, or None."""
    unit = train.micro_batch * data_parallel
    named = [("train.global_batch", train.global_batch)]
    named += [(f"train.batch_ramp[{i}].batch", point.batch) for i, point in enumerate(train.batch_ramp)]
    for name, batch in named:
        if batch % unit:
            near = max(unit, round(batch / unit) * unit)
            each = batch // data_parallel if batch % data_parallel == 0 else 0
            micro = max((m for m in range(1, min(train.micro_batch, each) + 1) if each % m == 0), default=0)
            keeping = f"; train.micro_batch={micro} keeps the batch" if micro else ""
            return (
                f"{name} {batch} is not a multiple of train.micro_batch {train.micro_batch} x data-parallel size "
                f"{data_parallel} = {unit}; the nearest that is: {near}{keeping}"
            )
    return None


def choices(config: RunConfig, world: int) -> Iterator[Choice]:
    """All that could be meant on ``world`` ranks, legal or not."""
    own = choice_of(config)
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for tensor in sizes:
        for pipeline in (size for size in sizes if world % (tensor * size) == 0):
            for sequence in (size for size in sizes if world % (tensor * pipeline * size) == 0):
                for stage in range(4):
                    for shared in {own.tensor_sequence_parallel, False}:
                        yield Choice(tensor, pipeline, sequence, stage, shared)


def changed(own: Choice, other: Choice) -> list[str]:
    """Names of the fields in which two choices differ."""
    return [name for name, value in vars(own).items() if getattr(other, name) != value]


def _distance(own: Choice, other: Choice) -> tuple[float, ...]:
    """Fields changed first, then by how many factors of two sizes change, then ZeRO stages."""
    sizes = sum(
        abs(math.log2(getattr(own, axis) / getattr(other, axis))) for axis in ("tensor", "pipeline", "sequence")
    )
    stages = abs(own.zero_stage - other.zero_stage)
    return len(changed(own, other)), sizes, stages, -other.tensor, -other.pipeline


def nearest(config: RunConfig, world: int) -> list[Choice]:
    """Legal choices for the same run on as many ranks, those that change least first."""
    own = choice_of(config)
    legal = [choice for choice in choices(config, world) if problem(config, choice, world) is None]
    return sorted(legal, key=lambda choice: _distance(own, choice))


def shown(config: RunConfig, world: int) -> list[Choice]:
    """The nearest few, without those that only change something more than one that is shown."""
    own = choice_of(config)
    found: list[Choice] = []
    for choice in nearest(config, world):
        if not any(all(getattr(choice, f) == getattr(other, f) for f in changed(own, other)) for other in found):
            found.append(choice)
            if len(found) == SHOWN:
                break
    return found


def _overrides(own: Choice, other: Choice) -> str:
    return " ".join(f"parallel.{name}={str(getattr(other, name)).lower()}" for name in changed(own, other))


def legal_layout(config: RunConfig, world: int) -> Layout:
    """The layout of a run on ``world`` ranks.

    Raises:
        UserError: it cannot run; names what is wrong and the nearest layouts on as many ranks that can.
    """
    own = choice_of(config)
    wrong = problem(config, own, world)
    if wrong is None:
        return Layout(own.tensor, own.pipeline, own.sequence, world // own.model)
    near = [_overrides(own, choice) for choice in shown(config, world)]
    way = (
        f"legal on {world} ranks: {', or '.join(near)}" if near else f"no layout of this run is legal on {world} ranks"
    )
    below = world // own.model * own.model
    counts = [below, below + own.model] if world % own.model else []
    legal = [str(count) for count in counts if count and problem(config, own, count) is None]
    ranks = f"; or use {' or '.join(legal)} ranks" if legal else ""
    raise UserError(f"{wrong}; {way}{ranks}", shared=True)
