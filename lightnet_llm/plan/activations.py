"""Bytes that one rank keeps of a micro-batch between its forward and its backward pass, and what passes through besides.

Written down from what autograd saves with the Triton kernels: `tests/unit/plan/test_activations.py` runs the model on tensors
without storage, counts every saved storage once, and asks for the same number of bytes. Scans that run in PyTorch on a GPU
(`decay: independent`) are fitted to the same count, within 2 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.model import ModelConfig
from ..models.layers import padded_size

BLOCK = 64  # tokens for which the scan, and MD-TPE, keep one state
TILE = 64  # of MD-TPE: chunks a kept state
LOSS_CHUNK = 4096  # tokens of which the loss holds logits at once
# Bytes a token and feature of a scan in PyTorch, which works in float32.
TORCH_CAUSAL, TORCH_GAIN, TORCH_BIDIRECTIONAL, TORCH_ANGLES, TORCH_WEIGHT = 16, 8, 20, 16, 12


@dataclass(frozen=True)
class Work:
    """What one rank does of a micro-batch.

    Attributes:
        rows: samples.
        length: tokens that this rank has of each.
        tensor: tensor-parallel ranks.
        shared: whether they share the tokens outside their layers.
        element: bytes of an activation's element, 2 or 4.
        states: states of other sequence-parallel ranks that a layer keeps, 0 without sequence parallelism.
        wide: bytes of an element of the residual stream and of its norms where these are others than those of products (4
            under autocast, which narrows what a product reads), else 0.
    """

    model: ModelConfig
    rows: int
    length: int
    tensor: int = 1
    shared: bool = False
    element: int = 2
    states: int = 0
    wide: int = 0

    @property
    def tokens(self) -> int:
        """Inside of tensor-parallel layers."""
        return self.rows * self.length

    @property
    def own(self) -> int:
        """Tokens of the residual stream."""
        return self.tokens // self.tensor if self.shared else self.tokens

    @property
    def heads(self) -> int:
        """Heads on this rank."""
        return padded_size(self.model.heads, self.tensor) // self.tensor

    @property
    def features(self) -> int:
        """Heads x head width on this rank."""
        return self.heads * self.model.head_width

    @property
    def glu(self) -> int:
        """Inner width of the gated linear unit on this rank."""
        return padded_size(self.model.glu_width, self.tensor) // self.tensor

    @property
    def vocabulary(self) -> int:
        """Rows of the padded vocabulary on this rank."""
        return padded_size(self.model.vocab_size, 128 * self.tensor) // self.tensor

    @property
    def residual(self) -> int:
        """Bytes of the residual stream."""
        return self.own * self.model.width * (self.wide or self.element)

    @property
    def normed(self) -> int:
        """Bytes of its norm."""
        return self.own * self.model.width * (self.wide or self.element)

    @property
    def entered(self) -> int:
        """Bytes of the norm of all tokens, which products read."""
        return self.tokens * self.model.width * (self.wide or self.element)

    @property
    def whole(self) -> int:
        """Bytes of all tokens in full width."""
        return self.tokens * self.model.width * self.element

    @property
    def fused(self) -> bool:
        """Whether the scan has Triton kernels that `auto` chooses."""
        return self.model.decay == "shared" and self.model.mixer == "lightnet"


@dataclass(frozen=True)
class Kept:
    """Bytes: of activations, and of scans' states."""

    activations: int
    states: int

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.activations + other.activations, self.states + other.states)

    def __mul__(self, times: int) -> Kept:
        return Kept(self.activations * times, self.states * times)

    def part(self, numerator: int, denominator: int) -> Kept:
        """A share, rounded up."""
        return Kept(*(-(-size * numerator // denominator) for size in (self.activations, self.states)))

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.states


def block(work: Work) -> Kept:
    """Of one block without recomputation."""
    model, element, tokens, own = work.model, work.element, work.tokens, work.own
    inner = tokens * work.features * element
    kept = work.residual + 4 * own  # what the first norm reads, an inverse root a token
    kept += work.normed + (work.entered if work.shared else 0)  # its result, gathered where tokens are shared
    kept += tokens * model.gate_rank * element + inner  # the gate's first product and the gate
    if model.decay == "independent":
        kept += tokens * model.decay_rank * element
    kept += inner + 4 * tokens * work.heads + inner  # the scan's output, inverse roots, gated and normed
    kept += work.residual + 4 * own  # the stream between the branches
    kept += work.entered  # its norm, gathered where tokens are shared
    kept += 3 * tokens * work.glu * element
    if model.dropout:
        kept += 2 * own * model.width  # masks
    scan = _scan(work)
    return Kept(kept + scan.activations, scan.states)


def received_states(work: Work) -> int:
    """States of other sequence-parallel ranks that a layer keeps."""
    width = work.model.head_width
    rows = 2 * width if work.model.lrpe else width
    return work.states * work.rows * work.heads * (rows * width + 2 * width) * 4


def _scan(work: Work) -> Kept:
    """What the scan keeps but for its output, query, key and value among it."""
    model, features, heads = work.model, work.features, work.heads
    width = model.head_width
    rows = 2 * width if model.lrpe else width
    blocks = work.rows * -(-work.length // BLOCK)
    angles = 4 * features if model.lrpe and model.lrpe_learnable and model.lrpe_gradient_scale != 1.0 else 0
    received = received_states(work)
    if model.mixer == "softmax":
        return Kept(3 * work.tokens * features * work.element + 4 * work.tokens * heads, 0)
    if work.fused and not model.causal:  # one state a sequence
        states = work.rows * heads * (rows * width * work.element + 2 * width * 4)
        return Kept(3 * work.tokens * features * work.element + angles, states + received)
    if work.fused:
        states = blocks * heads * (rows * width * work.element + 3 * width * 4 + 4)
        if model.lrpe:
            angles += 2 * features * BLOCK * work.element + 8 * features * (BLOCK + 1)
        return Kept(3 * work.tokens * features * work.element + angles, states + received)
    packed = blocks * BLOCK * features
    if model.causal:
        each = TORCH_CAUSAL + (TORCH_GAIN if model.decay == "independent" else 0)
        states = (blocks + work.rows) * heads * (rows * width + width) * 4
        return Kept(each * packed + angles, states + received)
    each = (
        TORCH_BIDIRECTIONAL
        + (TORCH_ANGLES if model.lrpe else 0)
        + (TORCH_WEIGHT if model.decay == "independent" else 0)
    )
    tables = 16 * work.length * features if model.lrpe else 0
    return Kept(each * work.tokens * features + tables + angles, work.rows * heads * rows * width * 4 + received)


def largest_tensor(work: Work) -> int:
    """Of those that every block makes anew: an inner one of the gated linear unit, query, or the scan's states of all blocks."""
    model, states = work.model, 0
    if work.fused and model.causal:
        rows = 2 * model.head_width if model.lrpe else model.head_width
        states = work.rows * -(-work.length // BLOCK) * rows * work.features * work.element
    return max(states, work.tokens * max(work.glu, work.features) * work.element)


def recomputed(work: Work) -> Kept:
    """Of a block that computes its activations again: its input."""
    return Kept(work.residual, 0)


def embedding(work: Work) -> Kept:
    """Of the embedding with MD-TPE, which runs on whole sequences before tokens are shared."""
    model = work.model
    kept = 8 * work.tokens
    if model.dropout:
        kept += work.own * model.width
    if not model.tpe:
        return Kept(kept, 0)
    mirrored = (not model.causal) if model.tpe_bidirectional is None else model.tpe_bidirectional
    table = 4 * model.width * model.tpe_rank
    chunks = work.rows * -(-work.length // BLOCK)
    # Decay, its complement and the gain, in the mirrored form two more; a state for each sequence and each tile.
    states = table * ((2 if mirrored else 1) * -(-chunks // TILE) + work.rows)
    return Kept(kept + work.entered + table * (5 if mirrored else 3), states)


def head(work: Work) -> Kept:
    """Of the final norm; the loss is apart."""
    return Kept(work.residual + 4 * work.own, 0)


def loss(work: Work) -> int:
    """What the loss keeps: gradients, made while it has the logits, to activations and (float32) to the weight."""
    return work.whole + 4 * work.vocabulary * work.model.width


def loss_peak(work: Work) -> int:
    """What the loss holds at most, kept things included: its input and a chunk's logits as well, and under autocast copies
    of input and weight that products read."""
    narrow = work.whole + work.vocabulary * work.model.width * work.element if work.wide else 0
    chunk = min(LOSS_CHUNK, work.tokens) * work.vocabulary * work.element
    return loss(work) + work.entered + narrow + chunk


def backward_peak(work: Work) -> int:
    """What the backward pass of a block needs beyond what was kept, at most.

    Of the gated linear unit, while all is kept still: the gradient of the stream and of gate and up, whose product is free by
    then. Of the scan, when what the gated linear unit kept is free: gradients of query, key, value and output, the
    queries' quotients, and of every block's state one gradient.
    """
    kept = block(work)
    unit = work.residual + work.entered + 2 * work.tokens * work.glu * work.element
    freed = work.entered + 3 * work.tokens * work.glu * work.element
    scan = work.residual + 5 * work.tokens * work.features * work.element + kept.states - freed
    if not work.fused and work.model.mixer == "lightnet":  # PyTorch's own backward pass, in float32
        scan += 4 * 4 * work.tokens * work.features
    return max(unit, scan)
