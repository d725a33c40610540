"""What each rank of a layout must hold, asserted by the rank itself in the midst of a run.

Expected sizes follow from the layout by the arithmetic here, not from the code that cuts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.initial_values import drawn, part

SEEN = "shards asserted"  # what a rank prints when all of it held


def check_shards() -> None:
    """Have every engine looked at once it is built, and the activations of its blocks in its first pass."""
    from lightnet_llm.training import loop

    build = loop.build_engine

    def checked(*arguments: Any, **options: Any) -> Any:
        engine = build(*arguments, **options)
        _groups(engine)
        parameters = _parameters(engine)
        _initial_values(engine)
        _optimizer_states(engine, parameters)
        _activations(engine)
        return engine

    loop.build_engine = checked


def _ceil(size: int, parts: int) -> int:
    return -(-size // parts)


def _groups(engine: Any) -> None:
    layout, groups = engine.config.parallel, engine.groups
    tensor, pipeline, sequence = layout.tensor, layout.pipeline, layout.sequence
    data = dist.get_world_size() // (tensor * pipeline * sequence)
    assert dist.get_world_size(groups.tensor_group) == tensor
    assert dist.get_world_size(groups.data_group) == data * sequence == engine.engine.dp_world_size
    assert dist.get_world_size(groups.model_group) == tensor * pipeline
    assert (groups.sequence is None) == (sequence == 1)
    if groups.sequence is not None:
        assert dist.get_world_size(groups.sequence.group) == sequence
    if pipeline > 1:
        grid = engine.engine.grid
        sizes = grid.pipe_parallel_size, grid.data_parallel_size, grid.get_slice_parallel_world_size()
        assert sizes == (pipeline, data * sequence, tensor)


def _parameters(engine: Any) -> dict[str, int]:
    """Names, and numbers of elements of this rank's part."""
    from lightnet_llm.models import CausalLM
    from lightnet_llm.models.parameters import spec_of
    from lightnet_llm.parallel.holdings import stage_holdings

    config, tensor = engine.config, engine.config.parallel.tensor
    with torch.device("meta"):
        whole = {name: spec_of(p) for name, p in CausalLM(config.model).named_parameters()}
    sizes = {}
    for name, parameter in engine.module.named_parameters():
        shape = list(whole[name].shape)
        dim = whole[name].partition_dim
        if name in ("embedding.weight", "head.weight"):
            shape[0] = _ceil(shape[0], 128 * tensor) * 128
        elif dim is not None:
            shape[dim] = _ceil(shape[dim], tensor)
        found = getattr(parameter, "ds_shape", parameter.shape)
        assert list(found) == shape, f"{name}: {list(found)}, expected {shape}"
        sizes[name] = torch.Size(shape).numel()
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, (engine.groups.place["pipeline"], sorted(sizes)))
    stages = dict(names)
    assert all(found == stages[stage] for stage, found in names), "ranks of a stage hold different parameters"
    held = [name for found in stages.values() for name in found]
    assert set(held) == set(whole)
    twice = {name for name in held if held.count(name) > 1}
    holding = stage_holdings(config, engine.groups.layout, engine.stages or None)[engine.groups.place["pipeline"]]
    assert holding.parameters == sum(sizes.values()), f"the dry run says {holding.parameters}"
    tied = config.model.tie_embeddings and engine.config.parallel.pipeline > 1
    assert twice == ({"embedding.weight"} if tied else set()), twice
    return sizes


def _initial_values(engine: Any) -> None:
    """The same bits in every layout."""
    from lightnet_llm.models.parameters import spec_of

    config, tensor_rank = engine.config, engine.groups.place["tensor"]
    for name, parameter in engine.module.named_parameters():
        full = drawn(config.model, config.train.seed, name, spec_of(parameter).shape)
        wanted = part(full, tuple(getattr(parameter, "ds_shape", parameter.shape)), tensor_rank)
        found = parameter.detach().cpu()
        if hasattr(parameter, "ds_tensor"):
            found, first = parameter.ds_tensor.detach().cpu(), dist.get_rank(parameter.ds_process_group)
            wanted = wanted.flatten()[first * found.numel() :][: found.numel()]
            found = found[: wanted.numel()]
        assert torch.equal(found, wanted.to(found.dtype)), f"{name} began with other values"


def _optimizer_states(engine: Any, sizes: dict[str, int]) -> None:
    stage, ranks = engine.zero_stage, engine.groups.data_size
    optimizer, total = engine.engine.optimizer, sum(sizes.values())
    if stage == 3:
        for name, parameter in engine.module.named_parameters():
            assert parameter.ds_tensor.numel() == _ceil(sizes[name], ranks), name
        return
    if stage == 0:
        held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        assert held == total
        return
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if not flat:
        flat = optimizer.fp32_groups_flat_partition
    held, padding = sum(x.numel() for x in flat) * ranks, 64 * ranks * len(flat)
    assert total <= held <= total + padding, f"{held} of {total} on {ranks} ranks"


def _activations(engine: Any) -> None:
    from lightnet_llm.models.block import Block

    config, parallel = engine.config, engine.config.parallel
    tokens = config.train.micro_batch * _ceil(config.data.sequence_length, parallel.sequence)
    if parallel.tensor_sequence_parallel:
        tokens //= parallel.tensor
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    if not blocks:  # a stage of the embedding or the head alone: by measured time there may be one
        print(f"{SEEN}: 0 blocks", flush=True)
        return

    def look(block: Any, arguments: Any) -> None:
        shape = tuple(arguments[0].shape)
        assert shape == (1, tokens, config.model.width), f"block {block.index}: {shape}, expected {tokens} tokens"
        handle.remove()
        print(f"{SEEN}: {len(blocks)} blocks, {tokens} tokens", flush=True)

    handle = blocks[-1].register_forward_pre_hook(look)
