"""Memory and time of a conversion: a preset's shape with random weights, written as a parallel run writes it, to Hugging Face.

    python benchmarks/conversion.py pile_2.9b --folder /tmp        disk: four bytes a parameter, given back at the end

Prints the peak resident memory of `lightnet convert`, its gate included. Exit 1: above --limit GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lightnet_llm.checkpoint import store
from lightnet_llm.checkpoint.weights import part_file, write_weights
from lightnet_llm.config import dump_config
from lightnet_llm.config.load import load_config
from lightnet_llm.convert.source import specs_of
from lightnet_llm.models.layers import padded_size
from lightnet_llm.models.parameters import shard


def write(run: Path, preset: str, tensor: int, stages: int) -> int:
    """A bf16 checkpoint of random weights, part by part; returns the number of parameters."""
    config = load_config(preset, ["train.precision=bf16"])
    specs, place = specs_of(config.model), store.begin(run / "checkpoints", 1)
    for stage in range(stages):
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(tensor)]
        joins = {}
        for index, (name, spec) in enumerate(specs.items()):
            where = int(name.split(".")[1]) * stages // config.model.layers if name.startswith("layers.") else 0
            if stage != (stages - 1 if name.startswith(("norm", "head")) else where):
                continue
            full = spec.init(torch.Generator().manual_seed(index), spec.shape)
            full = full if spec.keep_fp32 else full.bfloat16()
            shape = list(spec.shape)
            if spec.partition_dim is not None:
                multiple = 128 * tensor if name in ("embedding.weight", "head.weight") else tensor
                shape[spec.partition_dim] = padded_size(shape[spec.partition_dim], multiple) // tensor
            for rank in range(tensor):
                parts[rank][name] = shard(full, spec, tuple(shape), rank).clone(memory_format=torch.contiguous_format)
            joins[name] = {"dim": spec.partition_dim, "shape": list(spec.shape)}
        for rank in range(tensor):
            write_weights(part_file(place, stage, rank), parts[rank], joins, rank, tensor)
    (place / "config.yaml").write_text(dump_config(config))
    layout = {"tensor": tensor, "pipeline": stages, "data": 1, "sequence": 1}
    store.commit(run / "checkpoints", 1, {"format": 1, "state": {"step": 1}, "layout": layout, "zero_stage": 1})
    return sum(torch.Size(spec.shape).numel() for spec in specs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="pile_2.9b")
    parser.add_argument("--folder", default="/tmp", help="where there is room")
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--limit", type=float, default=8.0, help="GiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        parameters = write(Path(folder) / "run", arguments.preset, arguments.tensor, arguments.stages)
        command = [sys.executable, "-m", "lightnet_llm.cli", "convert", f"{folder}/run", f"{folder}/hf", "--to", "hf"]
        start = time.perf_counter()
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        facts = json.loads(done.stdout)
    print(
        f"{arguments.preset}: {parameters:,} parameters, TP {arguments.tensor} x PP {arguments.stages} -> hf: "
        f"peak {peak:.2f} GiB, {seconds:.0f} s, logits {facts['difference']:.1e} apart; torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    )
    sys.exit(0 if peak <= arguments.limit else 1)


if __name__ == "__main__":
    main()
