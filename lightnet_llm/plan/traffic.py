"""Bytes between the ranks of a layout, by axis and link, and the seconds they take.

Ranks are ordered tensor, sequence, data, pipeline (:mod:`lightnet_llm.parallel.layout`), so an axis stays inside a host while
the product of the sizes up to it does. Collectives are counted as rings: an all-reduce of S bytes over n ranks sends
2 (n - 1) / n S from each, a gather or a reduce-scatter half of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..parallel.legality import Choice
from .activations import Work
from .hardware import Hardware, Link
from .memory import Part


@dataclass(frozen=True)
class Moved:
    """What a rank sends in one step along an axis.

    Attributes:
        axis: tensor, sequence, data or pipeline.
        link: the slowest one on the way.
        bytes: per rank.
        calls: collectives or messages.
        seconds: until they are through; nothing of them is taken to overlap with computation.
    """

    axis: str
    link: str
    bytes: int
    calls: int
    seconds: float


def link_of(choice: Choice, axis: str, data: int, hardware: Hardware) -> Link:
    """The slowest link between the ranks of a group along an axis.

    A ring over several hosts passes through all of a group's cards in each and leaves by each one's own port, so it has
    the bandwidth of as many ports as the group has cards in every one of them, up to NVLink's. A message has one port.
    """
    span = choice.tensor
    if axis != "tensor":
        span *= choice.sequence
    if axis in ("data", "pipeline"):
        span *= data
    if axis == "pipeline":
        span *= choice.pipeline
    world = choice.tensor * choice.sequence * choice.pipeline * data
    if world <= hardware.per_node or hardware.per_node % span == 0:  # else some groups lie on two hosts
        return hardware.nvlink
    port = hardware.infiniband
    if axis == "pipeline":
        return port
    apart = (
        1 if axis == "tensor" else choice.tensor
    )  # ranks between neighbours; data-parallel groups hold sequences, too
    ports = max(1, math.gcd(span, hardware.per_node) // apart)
    return replace(port, bytes_s=min(hardware.nvlink.bytes_s, ports * port.bytes_s))


def ring(size: int, ranks: int, passes: int) -> int:
    """Bytes that a rank sends: ``passes`` 1 for a gather or scatter of ``size`` in all, 2 for an all-reduce."""
    return passes * size * (ranks - 1) // ranks


def traffic(part: Part, micro_batch: int, every: int, accumulation: int, hardware: Hardware) -> list[Moved]:
    """Of a rank of one pipeline stage in one step, an entry for each axis that has ranks."""
    choice, work = part.choice, part.work(micro_batch)
    found = []
    for axis, (sent, calls, group) in {
        "tensor": (*_tensor(part, work, every, accumulation), choice.tensor),
        "sequence": (*_sequence(part, work, every, accumulation), choice.sequence),
        "data": (*_data(part, accumulation), part.ranks),
        "pipeline": (*_pipeline(part, work, accumulation), choice.pipeline),
    }.items():
        if group > 1 and calls:
            link = link_of(choice, axis, part.data, hardware)
            steps = 1 if axis == "pipeline" else 2 * math.ceil(math.log2(group))
            seconds = sent / link.bytes_s + calls * steps * link.latency_s
            found.append(Moved(axis, link.name, sent, calls, seconds))
    return found


def _tensor(part: Part, work: Work, every: int, accumulation: int) -> tuple[int, int]:
    """Sums after row layers and of the gradients into column layers; with shared tokens gathers and scatters of the same
    bytes. A block that computes again sums again."""
    ranks, model = part.choice.tensor, part.model
    whole = ring(work.whole, ranks, 2)
    gate = ring(work.tokens * model.gate_rank * work.element, ranks, 2)
    decay = ring(work.tokens * model.decay_rank * work.element, ranks, 2) if model.decay == "independent" else 0
    blocks, again = len(part.blocks), part.recomputes[every]
    sent = blocks * (4 * whole + gate + decay) + again * 2 * whole
    calls = blocks * (5 + (decay > 0)) + again * 2
    if part.first:  # the vocabulary's parts of the embedding
        sent, calls = sent + whole, calls + 1
    if part.last:  # gradient of the head's input, and the loss's maxima and sums
        sent, calls = sent + whole + ring(12 * work.tokens, ranks, 2), calls + 3
    return accumulation * sent, accumulation * calls


def _sequence(part: Part, work: Work, every: int, accumulation: int) -> tuple[int, int]:
    """A state for each row and block, forward and (without maxima) backward; MD-TPE's once. On GPUs the maxima go along
    backward, a hundredth more, which is not counted."""
    ranks, model = part.choice.sequence, part.model
    if ranks == 1:
        return 0, 0
    width, flying = model.head_width, part.in_flight
    values = (2 if model.lrpe else 1) * width * width * flying
    messages = 1 if part.gathers else 4  # states are handed on in so many blocks of heads, each with lengths
    length = 8 * work.rows * messages
    forward = work.rows * work.heads * (values + 8 * width) + length  # maxima and normalisers stay in float32
    backward = work.rows * work.heads * (values + 4 * width)
    position = work.rows * model.width * model.tpe_rank * flying
    blocks, again = len(part.blocks), 0 if part.gathers else part.recomputes[every]  # what is gathered is kept
    ahead, back = (blocks + again) * forward, blocks * backward
    directions = 1 if model.causal else 2
    calls = directions * (2 * blocks + again)
    if part.first and model.tpe:
        ahead, back, calls = ahead + position + length, back + position, calls + 2 * directions
    # Of two ranks that hand states on one sends forward and one backward.
    sent = (ranks - 1) * (ahead + back) if part.gathers else ahead + back if ranks > 2 else max(ahead, back)
    sent, calls = directions * sent, calls * messages
    return accumulation * sent, accumulation * calls


def _data(part: Part, accumulation: int) -> tuple[int, int]:
    """Gradients summed and parameters gathered, by ZeRO stage: as DeepSpeed is told to, and as :mod:`..training.bf16` does."""
    ranks, trained, element = part.ranks, part.trained, 2 if part.bf16 else 4
    weights, gradients = part.whole_weights, element * trained
    buckets = -(-trained // part.bucket)
    if part.zero == 0:
        return ring(gradients, ranks, 2), buckets
    if part.zero == 1 and part.bf16:  # each rank gets its part of the fp32 sums; a call for each group of parameters
        return ring(4 * trained, ranks, 1) + ring(weights, ranks, 1), 4
    if part.zero == 1:
        return ring(gradients, ranks, 2) + ring(weights, ranks, 1), buckets + 2
    if part.zero == 2:  # reduced with every micro-batch
        return accumulation * ring(gradients, ranks, 2) + ring(weights, ranks, 1), accumulation * buckets + 2
    inside = len(part.blocks) * part.block_elements
    sent = element * inside + 4 * (trained - inside)  # the rest goes in float32
    again = trained - part.gathered()  # what did not stay for the backward pass
    calls = len(part.blocks) + -(-again // part.block_elements) + buckets
    return accumulation * (2 * ring(sent, ranks, 1) + ring(element * again, ranks, 1)), accumulation * calls


def _pipeline(part: Part, work: Work, accumulation: int) -> tuple[int, int]:
    """Activations to the next stage, their gradients to the one before."""
    neighbours = (not part.last) + (not part.first)
    return accumulation * neighbours * work.residual, accumulation * neighbours
