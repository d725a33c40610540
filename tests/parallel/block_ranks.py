"""Blocks split over two tensor-parallel ranks and recorded, beside the same blocks run by their modules: on every rank.

    python -m tests.parallel.block_ranks WORLD [DEVICE [few]]   forks (CPU, under Triton's interpreter) or spawns WORLD ranks

On two ranks blocks are recorded whole. On more each sequence is shared by WORLD / 2, and the parts around its exchange are."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from lightnet_kernels.recorded import _Pair
from torch import Tensor

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import recorded
from lightnet_llm.models.block import Block
from lightnet_llm.models.parameters import initialize, spec_of
from lightnet_llm.parallel.megatron import MegatronLayers
from lightnet_llm.parallel.sequence import SequencePlace, training_context
from tests.parallel.on_ranks import attempt, on_ranks

# Ranks' shares of tokens begin at addresses that are no multiples of 16 bytes where they are not copied.
TENSOR, TOKENS = 2, 68
CONFIG = ModelConfig(layers=2, width=50, heads=2, glu_width=80, vocab_size=9, gate_rank=8)
PACKINGS = ([0, 68], [0, 30, 68], [0, 1, 1, 67, 68], [0, 68])


def groups() -> tuple[dist.ProcessGroup, SequencePlace | None]:
    """Of this rank: the tensor-parallel group, and its place among those that share its sequences."""
    sequence = dist.get_world_size() // TENSOR
    tensors = [dist.new_group([*range(part * TENSOR, (part + 1) * TENSOR)]) for part in range(sequence)]
    sequences = [dist.new_group([*range(among, TENSOR * sequence, TENSOR)]) for among in range(TENSOR)]
    part, among = divmod(dist.get_rank(), TENSOR)
    place = SequencePlace(part, sequence, sequences[among], "all_gather") if sequence > 1 else None
    return tensors[part], place


def blocks_of(group: dist.ProcessGroup, shares: bool, again: bool, device: str) -> list[Block]:
    layers = MegatronLayers(group, share_tokens=shares)
    found = [Block(CONFIG, layers, index) for index in range(CONFIG.layers)]
    for number, block in enumerate(found):
        initialize(block, number)
        block.recompute = again
        for parameter in block.to(device).parameters():
            keeps = spec_of(parameter).keep_fp32
            parameter.data = 4 * parameter.data.to(torch.float32 if keeps else torch.bfloat16)
        layers.sum_shared_gradients(block)
    return found


def step(blocks: list[Block], place: SequencePlace | None, seed: int, device: str) -> list[Tensor]:
    """Output and every gradient of a batch."""
    rank, ranks = blocks[0].layers_set.token_shard
    part, parts = (place.rank, place.size) if place else (0, 1)
    generator = torch.Generator().manual_seed(seed)
    x, upstream = torch.randn(2, parts, 1, TOKENS // parts, CONFIG.width, generator=generator).bfloat16()[:, part]
    upstream = upstream.chunk(ranks, 1)[rank]
    leaf = x.to(device, copy=True).requires_grad_()
    output = blocks[0].layers_set.share_tokens(leaf)
    bounds, ids = torch.tensor(PACKINGS[seed], dtype=torch.int32), torch.zeros(1, dtype=torch.int64, device=device)
    context = training_context(bounds, ids, TOKENS, CONFIG, 0, 1, place)
    for block in blocks:
        output, _ = block(output, context)
        block.zero_grad()
    output.backward(upstream.to(device))
    gradients = [x.grad for block in blocks for x in block.parameters()]
    assert leaf.grad is not None and all(x is not None and bool(x.any()) for x in gradients)
    return [output.detach(), leaf.grad, *(x.clone() for x in gradients if x is not None)]


def check_blocks(group: dist.ProcessGroup, place: SequencePlace | None, shares: bool, again: bool, device: str) -> None:
    """Bits are those of modules, for other packings; hooks that sum gradients run once."""
    blocks, recordable = blocks_of(group, shares, again, device), recorded.recordable
    known = blocks[0].layers_set.recordings
    assert known is not None
    try:
        recorded.recordable = lambda x, decided=None: False  # type: ignore[assignment]
        wanted = [step(blocks, place, seed, device) for seed in range(len(PACKINGS))]
        recorded.recordable = recordable if device == "cuda" else lambda x, decided=None: True  # type: ignore[assignment]
        found = [step(blocks, place, seed, device) for seed in range(len(PACKINGS))]
    finally:
        recorded.recordable = recordable
    assert [type(x) for x in known.values()] == [_Pair] * (3 if place else 1)
    for way in ("forward", "backward"):
        steps = [f"{x}" for pair in known.values() for x in getattr(pair, way).names.values()]
        assert any("waited_for" in x or "c10d" in x for x in steps), steps
    for seed, (one, two) in enumerate(zip(found, wanted, strict=True)):
        same = [torch.equal(x, y) for x, y in zip(one, two, strict=True)]
        assert all(same), (seed, same)


def scattered(output: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """gloo's own copies where Python waits for it, in sight of what records steps."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    output.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def run_all(device: str, few: str = "") -> None:
    """Every case, or a few in which everything happens once."""
    if device == "cpu":
        from megatron.core.tensor_parallel import mappings

        from tests.unit.kernels.interpreter import kernels_on_cpu

        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        mappings.dist_reduce_scatter_func = scattered
        kernels_on_cpu(setattr)
    group, place = groups()
    cases = [(False, True), (True, False), *([] if few else [(False, False), (True, True)])]
    for shares, again in cases:
        attempt(f"shares={shares} again={again}", check_blocks, group, place, shares, again, device)


def main() -> int:
    return on_ranks("tests.parallel.block_ranks", run_all, int(sys.argv[1]), *(sys.argv[2:] or ["cpu"]))


if __name__ == "__main__":
    sys.exit(main())
