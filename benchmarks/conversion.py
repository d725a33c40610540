"""Memory and time of a conversion: a preset's shape with random weights, written as a parallel run writes it, to Hugging Face.

    python benchmarks/conversion.py pile_2.9b --folder /tmp        disk: four bytes a parameter, given back at the end

Prints the peak resident memory of `lightnet convert`, its gate included, and keeps it as JSON. Exit 1: above --limit GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lightnet_llm.config.load import load_config
from lightnet_llm.convert.source import specs_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.unit.convert.toy import checkpoint

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="pile_2.9b")
    parser.add_argument("--folder", default="/tmp", help="where there is room")
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--limit", type=float, default=8.0, help="GiB")
    parser.add_argument("--output", help="JSON file [default: conversion-PRESET-DATE.json beside this script]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        config = load_config(arguments.preset, ["train.precision=bf16"])
        checkpoint(Path(folder) / "run", config, arguments.tensor, arguments.stages)  # stage by stage
        parameters = sum(torch.Size(spec.shape).numel() for spec in specs_of(config.model).values())
        command = [sys.executable, "-m", "lightnet_llm.cli", "convert", f"{folder}/run", f"{folder}/hf", "--to", "hf"]
        start = time.perf_counter()
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        facts = json.loads(done.stdout)
    found = {
        "preset": arguments.preset,
        "parameters": parameters,
        "tensor_parallel": arguments.tensor,
        "pipeline_stages": arguments.stages,
        "to": "hf",
        "dtype": facts["dtype"],
        "bytes_written": facts["bytes"],
        "files": facts["files"],
        "logits_difference": facts["difference"],
        "peak_gib": peak,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python", "benchmarks/conversion.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    target = Path(arguments.output or HERE / f"conversion-{arguments.preset}-{found['date']}.json")
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{arguments.preset}: {parameters:,} parameters, TP {arguments.tensor} x PP {arguments.stages} -> hf: "
        f"peak {peak:.2f} GiB, {seconds:.0f} s, logits {facts['difference']:.1e} apart; {target}"
    )
    sys.exit(0 if peak <= arguments.limit else 1)


if __name__ == "__main__":
    main()
