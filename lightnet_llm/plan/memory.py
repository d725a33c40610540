"""Device memory of a rank by kind, for any layout, without any ranks.

A training step has four places where memory can be at its peak: the loss, the backward pass of the last block and that of the
first, and the reduction of gradients with the update. What lasts (weights, gradients, optimiser) comes from
:mod:`lightnet_llm.parallel.holdings`; what passes follows DeepSpeed's engines as this project sets them up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from ..config.deepspeed import COPIED_AT_ONCE, PREFETCHED, block_elements, deepspeed_config, effective_zero_stage
from ..config.run import RunConfig
from ..errors import UserError
from ..models import CausalLM, count_parameters
from ..models.parameters import shapes_alone
from ..parallel import stages
from ..parallel.holdings import Holding, stage_holdings
from ..parallel.layout import Layout
from ..parallel.legality import Choice
from ..parallel.segments import SequencePlace
from . import activations
from .activations import Kept, Work
from .hardware import Hardware

# Of ZeRO-3: elements gathered at most before more are, and a distance to the next use within which they stay. DeepSpeed's.
LIVE = REUSE = 1_000_000_000
# Gaps, in largest tensors, that the allocator has and cannot use at the peak: tensors of gigabytes do not fit where others were.
GAPS = 3


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, by kind.

    Attributes:
        gradients: accumulated ones, and of the backward pass those in the parameters' own dtype that have not joined them.
        activations, states: kept for the backward pass, of all micro-batches under way.
        loss: logits of a chunk and gradients made with them.
        passing: intermediate values of the backward pass.
        communication: buckets, payloads of pipeline stages, gathered parameters.
        reserve: the CUDA context with its libraries, and what the allocator cannot use.
        peak: where in the step.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    states: int
    loss: int
    passing: int
    communication: int
    reserve: int
    peak: str

    @cached_property
    def total(self) -> int:
        """All kinds."""
        return sum(self.kinds().values())

    @property
    def allocated(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` sees."""
        return self.total - self.reserve

    def kinds(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: getattr(self, name) for name in KINDS}

    def largest(self) -> str:
        """The kind with most bytes, reserve aside."""
        kinds = {kind: size for kind, size in self.kinds().items() if kind != "reserve"}
        return max(kinds, key=lambda kind: kinds[kind])


KINDS = [field.name for field in fields(Memory) if field.name != "peak"]


class Sizes:
    """Bytes of a micro-batch, see :mod:`.activations`; layouts that cut the work alike share one.

    Attributes:
        seconds: of a block, by card; filled where they are asked for (:mod:`.step_time`).
    """

    def __init__(self, work: Work):
        self.work = work
        self.seconds: dict[Hardware, tuple[float, float, float]] = {}
        self.block, self.again = activations.block(work), activations.recomputed(work)
        self.embedding, self.head = activations.embedding(work), activations.head(work)
        self.loss, self.passing = activations.loss_peak(work), activations.backward_peak(work)
        self.largest = activations.largest_tensor(work)


class Part:
    """One pipeline stage of one layout, whatever the micro-batch: what every rank of it holds and does.

    Args:
        config: the run; its own layout does not count.
        held: units of the stage.
        stage: index of the pipeline stage.
        data: ranks that read different samples.
        sizes: by micro-batch, filled when asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        choice: Choice,
        holding: Holding,
        held: list[str],
        stage: int,
        data: int,
        sizes: dict[int, Sizes],
    ):
        self._sizes = sizes
        self.choice, self.model, self.stage, self.data = choice, config.model, stage, data
        self.length = -(-config.data.sequence_length // choice.sequence)
        self.blocks = [int(unit.split(".")[1]) for unit in held if unit.startswith("layers.")]
        self.first, self.last = "embedding" in held, "head" in held
        self.bf16 = config.train.precision == "bf16"
        self.zero = effective_zero_stage(config)
        self.ranks = data * choice.sequence
        self.trained = holding.gradient_bytes // 4  # of one rank without cutting
        self.parameters, self.whole_weights = holding.parameters, holding.weight_bytes
        self.weights = -(-holding.weight_bytes // (self.ranks if self.zero == 3 else 1))
        self.gradients = -(-holding.gradient_bytes // (self.ranks if self.zero >= 2 else 1))
        self.optimizer = -(-holding.optimizer_bytes // (self.ranks if self.zero else 1))
        place = SequencePlace(0, choice.sequence, None).using(config.parallel.sequence_exchange, torch.float32)
        self.gathers = choice.sequence > 1 and place.gathers
        self.in_flight = 2 if config.parallel.sequence_exchange_dtype == "bf16" else 4
        zero = deepspeed_config(config, 1)["zero_optimization"]
        self.bucket = _elements(zero, "reduce_bucket_size", 500_000_000)
        self.buckets = 2 if zero.get("overlap_comm") and self.zero < 3 else 1  # one fills while the other is sent
        self.block_elements = block_elements(config)
        self.ahead, self.live, self.reuse = (
            _elements(zero, f"stage3_{name}" if f"stage3_{name}" in zero else name, usual)
            for name, usual in (
                ("prefetch_bucket_size", PREFETCHED), ("max_live_parameters", LIVE), ("max_reuse_distance", REUSE),
            )
        )  # fmt: skip
        self.recomputes: dict[int, int] = {
            every: sum(every > 0 and index % every == 0 for index in self.blocks)
            for every in (0, 1, config.parallel.recompute_every)
        }
        self.alike = (
            len(self.blocks), self.first, self.last, *self.recomputes.values(), self.trained, self.parameters,
            self.whole_weights, self.optimizer,
        )  # fmt: skip

    def work(self, micro_batch: int) -> Work:
        """What a rank does of a micro-batch."""
        return self.sizes(micro_batch).work

    def sizes(self, micro_batch: int) -> Sizes:
        """Bytes of a micro-batch."""
        if micro_batch not in self._sizes:
            self._sizes[micro_batch] = Sizes(self._work(micro_batch))
        return self._sizes[micro_batch]

    def _work(self, micro_batch: int) -> Work:
        received = (self.choice.sequence if self.gathers else 2) if self.choice.sequence > 1 else 0
        shared = self.choice.tensor_sequence_parallel and self.choice.tensor > 1
        return Work(
            self.model, micro_batch, self.length, self.choice.tensor, shared, 2 if self.bf16 else 4,
            received, 4 if self.bf16 and self.zero == 3 else 0,
        )  # fmt: skip

    def kept(self, micro_batch: int, every: int) -> Kept:
        """Of one micro-batch on this stage."""
        sizes, again = self.sizes(micro_batch), self.recomputes[every]
        total = sizes.block * (len(self.blocks) - again) + sizes.again * again
        if self.gathers:  # kept, so that a block is computed again without other ranks
            directions = 1 if self.model.causal else 2
            total = total + Kept(0, directions * activations.received_states(sizes.work)) * again
        total = total + sizes.embedding if self.first else total
        return total + sizes.head if self.last else total

    def memory(self, micro_batch: int, every: int, accumulation: int, hardware: Hardware) -> Memory:
        """At its peak.

        Args:
            micro_batch: samples.
            every: ``parallel.recompute_every``.
            accumulation: micro-batches of a step and data-parallel rank.
        """
        sizes = self.sizes(micro_batch)
        work, block, one = sizes.work, sizes.block, self.kept(micro_batch, every)
        running = min(accumulation, self.choice.pipeline - self.stage)
        all_kept, rest = one * running, one * (running - 1)
        embedding = sizes.embedding if self.first else Kept(0, 0)
        again = block if self.recomputes[every] else Kept(0, 0)
        passing = sizes.passing if self.blocks else 0
        vocabulary = work.vocabulary * self.model.width * work.element
        # Gradients in the parameters' dtype, until they join the sum: a block's, and the head's if the embedding has a part.
        narrow = self.whole_weights // max(1, len(self.blocks)) if self.bf16 and self.zero < 2 else 0
        if narrow and self.choice.pipeline == 1:  # some wait to be copied together
            narrow += min(self.whole_weights, work.element * COPIED_AT_ONCE)
        tied = vocabulary if self.last and self.bf16 and self.model.tie_embeddings else 0
        if self.zero == 3:  # those of a block, in float32, are there until it is through; then copies of a bucket's
            narrow, tied = 4 * self.block_elements + work.element * self.bucket, 4 // work.element * tied
        lasting = self._communication(work)
        buckets = self._buckets(work)
        # ZeRO-2's part of the gradients lasts from the first reduction of a step's first micro-batch to the update.
        late = self.gradients if self.zero == 2 and accumulation == 1 else 0
        # (place, kept, loss, passing, gradients beside the lasting ones, communication)
        places = [
            ("the backward pass of its first block", rest + block + embedding, 0,
             passing + (vocabulary if self.first else 0), narrow + tied, lasting + buckets),
            ("the reduction of gradients", Kept(0, 0), 0, 0, self._part(), lasting + buckets),
        ]  # fmt: skip
        if self.blocks:
            through = (
                self.bucket // self.block_elements if late else 0
            )  # blocks, when a bucket is sent for the first time
            place = "the backward pass of its last block"
            if through:
                places.append((place, all_kept + again, 0, passing, narrow + tied - late, lasting + buckets))
                place = "the first reduction of gradients"
            left = rest + one.part(max(0, len(self.blocks) - through), len(self.blocks))
            places.append((place, left + again, 0, passing, narrow + tied, lasting + buckets))
        if self.last:  # between two micro-batches DeepSpeed gives a bucket back
            places.append(("the loss", all_kept, sizes.loss, 0, -late, lasting + (buckets if self.zero == 3 else 0)))
        where, kept, loss, passed, more, sent = max(places, key=lambda p: p[1].total + sum(p[2:]))
        moving = kept.total + loss + passed + more + sent
        gaps = GAPS * sizes.largest if self.blocks else 0
        reserve = hardware.context_bytes + int(hardware.fragmentation * moving) + gaps
        return Memory(
            self.weights, self.gradients + more, self.optimizer, kept.activations, kept.states, loss, passed, sent,
            reserve, where,
        )  # fmt: skip

    def _part(self) -> int:
        """The optimiser's own copy of its part of the gradients: DeepSpeed's, but where ZeRO-2 adds bf16 gradients up in one
        float32 tensor, which it takes as it is."""
        copies = self.zero in {1, 2} and not self.bf16
        return 4 * self.trained // self.ranks if copies else 0

    def _communication(self, work: Work) -> int:
        """Of the whole step: payloads of pipeline stages, gathered parameters."""
        total = 0
        if self.choice.pipeline > 1:  # what is being sent, and a gradient that arrived
            total += 3 * work.residual
        if self.zero == 3:
            total += 4 * self.gathered()
        return total

    def _buckets(self, work: Work) -> int:
        """Gradients on their way, during the backward pass; those of ZeRO-3 stay."""
        if self.zero == 3:  # one for each dtype that they are sent in
            return self.bucket * (6 if self.bf16 else 4)
        return self.buckets * self.bucket * work.element if self.zero == 2 or (self.zero == 1 and not self.bf16) else 0

    def gathered(self) -> int:
        """Parameters that ZeRO-3 has whole when the forward pass ends; in float32, whatever they are sent and computed in.

        A block stays until its backward pass where that is near, or where it was looked at to be fetched for it: fetching
        ahead gets there long before the forward pass does, unless it meets its limit. What is outside of blocks stays.
        """
        blocks = len(self.blocks) * self.block_elements
        near = min(blocks, -(-self.reuse // self.block_elements) * self.block_elements)
        return max(self.trained - blocks + near, min(self.trained, self.live) if self.ahead else 0)


def distinct(stages: list[Part]) -> list[Part]:
    """Without those that hold and do what an earlier one does, which keeps no fewer micro-batches at a time."""
    found: dict[tuple[object, ...], Part] = {}
    for part in stages:
        found.setdefault(part.alike, part)
    return list(found.values())


class Parts:
    """Stages of all layouts of a run, each worked out once."""

    def __init__(self, config: RunConfig):
        self.config = config
        self._held: dict[tuple[int, int, int], tuple[list[Holding], list[int]]] = {}
        self._found: dict[tuple[Choice, int], list[Part]] = {}
        self._sizes: dict[tuple[int, int, bool, bool], dict[int, Sizes]] = {}

    @cached_property
    def model_parameters(self) -> int:
        """Exact, of the whole model, padding not counted."""
        with shapes_alone():
            return count_parameters(CausalLM(self.config.model))

    def of(self, choice: Choice, world: int) -> list[Part]:
        """One for each pipeline stage."""
        data = world // choice.model
        if (choice, data) not in self._found:
            config = with_choice(self.config, choice)
            key = choice.tensor, choice.pipeline, effective_zero_stage(config)
            if key not in self._held:
                bounds = _bounds(config, choice)
                layout = Layout(choice.tensor, choice.pipeline, 1, 1)
                self._held[key] = stage_holdings(config, layout, bounds), bounds
            holdings, bounds = self._held[key]
            units = stages.units(config.model)
            cut = choice.tensor, choice.sequence, choice.tensor_sequence_parallel, choice.zero_stage == 3
            sizes = self._sizes.setdefault(cut, {})
            self._found[choice, data] = [
                Part(config, choice, holding, units[bounds[stage] : bounds[stage + 1]], stage, data, sizes)
                for stage, holding in enumerate(holdings)
            ]
        return self._found[choice, data]


def with_choice(config: RunConfig, choice: Choice, **parallel: object) -> RunConfig:
    """The run in another layout."""
    update = {**vars(choice), **parallel}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=update)})


def _elements(zero: dict[str, Any], field: str, usual: int) -> int:
    """A number of elements that DeepSpeed is given."""
    value = zero.get(field, usual)
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        found = -1
    if found < 0:
        where = f"deepspeed.zero_optimization.{field}"
        raise UserError(f"{where} is {value!r}, not a number of elements; give one such as {usual}, or leave it out")
    return found


def _bounds(config: RunConfig, choice: Choice) -> list[int]:
    """Of the stages; those by time, which is not known, as if by parameters."""
    if choice.pipeline == 1:
        return [0, len(stages.units(config.model))]
    if config.parallel.pipeline_partition == "uniform":
        return stages.uniform(config.model, choice.pipeline)
    return stages.balanced(stages.counts(config.model, choice.tensor), choice.pipeline)
