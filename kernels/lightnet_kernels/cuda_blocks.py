"""What the causal scan does for each block of tokens, by CUDA C++ (`cuda/causal_outputs.cu`, `causal_queries.cu` and
`causal_answers.cu`): Triton's outputs, query_grads, key_grads and value_grads, but for blocks in the exact form. For the shapes
that `cuda_chains.runs` names, on sm_90: four warps multiply together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import cuda_chains, cuda_launch

FILES = ("warp.cuh", "causal_tiles.cuh")


def outputs(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, blocks: Tensor, found: Any, silu: bool
) -> None:  # fmt: skip
    """Fills output, as value, of blocks that have no flag. Other arguments: those of `query_grads`."""
    query, key, value = (cuda_chains.aligned(each) for each in (query, key, value))
    pointers = [blocks, found.cos, found.sin, found.kv, found.enter, found.mass, found.flag]
    _launch("causal_outputs", (query, key, value, output), pointers, {"SILU": int(silu)})


def query_grads(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, grad_query: Tensor, x: Tensor, later: Tensor, blocks: Tensor,
    found: Any, pressure: Tensor, torque: Tensor | None, silu: bool,
) -> None:  # fmt: skip
    """Fills grad_query, x, later, pressure and torque of blocks that have no flag.

    Args:
        query, key, value, grad: [B, N, H, D or V] bfloat16; grad_query, x, later: as query.
        blocks: int32 [blocks, 4], of `triton_tables.Tables`.
        found: `triton_scan.Blocks`.
    """
    query, key, value, grad = (cuda_chains.aligned(each) for each in (query, key, value, grad))
    tensors = (query, key, value, grad, grad_query, x, later)
    pointers = [blocks, found.cos, found.sin, found.kv, found.enter, found.mass, found.flag, pressure, torque]
    _launch("causal_queries", tensors, pointers, {"SILU": int(silu)})


def answers(
    key: Tensor, value: Tensor, grad: Tensor, x: Tensor, later: Tensor, grad_key: Tensor, grad_value: Tensor, blocks: Tensor,
    found: Any, block_grads: Tensor, pressure: Tensor, torque: Tensor | None,
) -> None:  # fmt: skip
    """Fills grad_key, which may be `later`, grad_value and torque of blocks that have no flag.

    Args:
        key, value, grad, x, later: as those of `query_grads`; grad_key, grad_value: as key and value.
        block_grads: what is asked of the state that each block leaves, [blocks, H, (2) D, V] bfloat16.
    """
    key, value, grad = (cuda_chains.aligned(each) for each in (key, value, grad))
    tensors = (key, value, grad, x, later, grad_key, grad_value)
    pointers = [blocks, found.cos, found.sin, block_grads, found.leave, found.flag, pressure, torque]
    _launch("causal_answers", tensors, pointers, {})


def _launch(name: str, tensors: tuple[Tensor, ...], pointers: list[Tensor | None], given: dict[str, int]) -> None:
    """One block of threads a block and head."""
    blocks, lrpe, value = pointers[0], pointers[1] is not None, tensors[1 if name == "causal_answers" else 2]
    assert blocks is not None
    count, heads, D, V = blocks.shape[0], value.shape[2], tensors[0].shape[3], value.shape[3]
    constants = {"LRPE": int(lrpe), **given, "D": D, "V": V, "WARPS": 4, "BLOCKS": 2}
    places = [stride for each in tensors for stride in each.stride()[:3]]
    arguments = [*tensors, *pointers, *places, heads]
    cuda_launch.launch(name, (*FILES, f"{name}.cu"), constants, count * heads, arguments)
