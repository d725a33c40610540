"""What ranks of real engines hold: weights, gradients when they are reduced, optimiser, after one step.

    python -m tests.unit.plan.held_ranks CONFIG CASES     CASES is JSON, [[world, [override, ..]], ..]

imports the stack once, forks the ranks of each case and prints one line of JSON a case: a mapping for each rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightnet_llm.launch.hosts import free_port


def _bytes(tensors: Any) -> int:
    """Of storages, each counted once."""
    found = {}
    for x in tensors:
        if isinstance(x, Tensor) and x.numel():
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(found.values())


def _gradients(engine: Any) -> int:
    optimizer = engine.engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return _bytes(optimizer.fp32_groups_gradients_flat)
    if engine.zero_stage == 3:
        return _bytes([optimizer.grad_partitions_flat_buffer])
    if engine.zero_stage == 2:
        return sum(x.numel() * x.element_size() for group in optimizer.averaged_gradients.values() for x in group)
    return _bytes(p.grad for p in engine.module.parameters())


def _optimizer(engine: Any) -> int:
    optimizer = engine.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    held = [x for state in inner.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
        held += getattr(optimizer, name, [])
    return _bytes(held)


def _weights(engine: Any) -> int:
    return _bytes(getattr(p, "ds_tensor", p.data) for p in engine.module.parameters())


def _gathered(engine: Any, batches: Iterator[Any], config: Any) -> int:
    """Elements that stage 3 has whole when a forward pass ends, after the steps in which it looks at the model."""
    found, backward = [], engine.engine.backward

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(sum(p.ds_numel for p in engine.module.parameters() if p.ds_status.name != "NOT_AVAILABLE"))
        return backward(*arguments, **options)

    engine.engine.backward = counted
    for step in (1, 2):
        engine.train_step(batches, step, config.train.global_batch)
    return found[-1]


def _measure(config: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from lightnet_llm.parallel.layout import Groups, prepare_backend
    from lightnet_llm.parallel.legality import legal_layout
    from lightnet_llm.training.engine import build_engine

    device = prepare_backend()
    engine = build_engine(config, Groups(legal_layout(config, dist.get_world_size())), device)
    rows, length = config.train.micro_batch, config.data.sequence_length

    def batches() -> Iterator[dict[str, Tensor]]:
        ids = torch.arange(rows * length).view(rows, length) % config.model.vocab_size
        while True:
            yield {
                "input_ids": ids,
                "labels": ids,
                "cu_seqlens": torch.arange(0, rows * length + 1, length, dtype=torch.int32),
                "sample_ids": torch.arange(rows),
            }

    found: dict[str, Any] = {}
    # In fp32 ZeRO-1 reduces what parameters hold, and the optimiser then has its part alone; else they are in buffers.
    early = engine.zero_stage == 1 and config.train.precision == "fp32"
    owner, name = (engine.engine, "allreduce_gradients") if early else (engine, "_step_alone")
    step = getattr(owner, name)

    def measured(*arguments: Any, **options: Any) -> None:
        found["gradients"] = _gradients(engine)
        step(*arguments, **options)

    setattr(owner, name, measured)
    engine.set_rate(1.0)
    engine.train_step(batches(), 0, config.train.global_batch)
    place = engine.groups.place
    if engine.zero_stage == 3:
        found |= {"gathered": _gathered(engine, batches(), config)}
    return {
        **found,
        "weights": _weights(engine),
        "optimizer": _optimizer(engine),
        "stage": place["pipeline"],
        "states_sent": 0 if engine.clock.place is None else engine.clock.place.traffic.bytes,
    }


def _rank(rank: int, world: int, port: int, config: Any, output: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    code = 1
    try:
        output.write_text(json.dumps(_measure(config)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(path: str, cases: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed talks on standard output
    from lightnet_llm.config import load_config

    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import lightnet_llm.training.loop  # noqa: F401  (the import that ranks share)

    for world, overrides in json.loads(cases):
        config, port = load_config(path, overrides), free_port()
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, str(rank)) for rank in range(world)]
            pids = []
            for rank, output in enumerate(outputs):
                pid = os.fork()
                if pid == 0:
                    _rank(rank, world, port, config, output)
                pids.append(pid)
            left = set(pids)
            while left:
                pid, status = os.wait()
                left.discard(pid)
                if status:  # the others would wait for it
                    for other in left:
                        os.kill(other, signal.SIGKILL)
                    raise SystemExit(f"{overrides}: rank {pids.index(pid)} of {world} failed")
            print(json.dumps([json.loads(output.read_text()) for output in outputs]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
