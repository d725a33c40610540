"""Ranks for tests: one import, then forks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightnet_llm.launch.hosts import free_port

ROOT = Path(__file__).resolve().parents[1]


CODE = """
import sys
from tests.parallel import faults
for name in filter(None, sys.argv[1].split(",")):
    getattr(faults, name)()
from lightnet_llm.training.main import start
sys.argv[1:] = sys.argv[2:]
start()
"""


class SpawnedRanks:
    """Runs the training main on one process a GPU: CUDA does not survive a fork."""

    @staticmethod
    def gpus() -> int:
        """GPUs of this machine."""
        return torch.cuda.device_count()

    def run(
        self,
        world: int,
        arguments: list[str],
        log: Path,
        plant: str | None = None,
        grace: float = 10,
        **environment: str,
    ) -> list[int]:
        """Exit codes of ``world`` ranks; those that outlive the first that failed by ``grace`` seconds are killed."""
        if world > self.gpus():
            pytest.skip(f"needs {world} GPUs")
        port = free_port()  # not an ephemeral one, which a connection of another run may have when ranks come to it
        processes = []
        for rank in range(world):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with Path(f"{log}.rank{rank}").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", CODE, plant or "", *arguments],
                        cwd=ROOT,
                        env={**os.environ, **place, **where, **environment},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.time() + 240
        while any(p.poll() is None for p in processes):
            failed = any(p.poll() for p in processes)
            if failed:
                deadline = min(deadline, time.time() + grace)
            if time.time() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.1)
        return [process.wait() for process in processes]

    def train(
        self, world: int, config: Path, overrides: list[str], tmp: Path, name: str, plant: str | None = None
    ) -> list[dict[str, Any]]:
        """Train and return the lines of metrics.jsonl; every rank must exit 0."""
        arguments = ["--config", str(config), f"train.output={tmp}", f"train.name={name}", *overrides]
        codes = self.run(world, arguments, tmp / f"{name}.log", plant)
        text = "".join(path.read_text()[-3000:] for path in sorted(tmp.glob(f"{name}.log.rank*")))
        assert codes == [0] * world, f"exit codes {codes}\n{text}"
        return read_metrics(tmp / name)

    def close(self) -> None:
        """Nothing is left running between calls."""


class Ranks(SpawnedRanks):
    """Runs the training main on ranks forked from one process that has imported everything."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["ready"]

    def run(
        self,
        world: int,
        arguments: list[str],
        log: Path,
        plant: str | None = None,
        grace: float = 5,
        **environment: str,
    ) -> list[int]:
        """As on GPUs."""
        request = {"world": world, "arguments": arguments, "log": str(log), "plant": plant, "grace": grace}
        request["environment"] = environment
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["codes"]

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(rows: list[dict[str, Any]], *fields: str) -> dict[int, tuple[Any, ...]]:
    """The named fields of every training step."""
    return {row["step"]: tuple(row[field] for field in fields) for row in rows if "loss" in row}


@pytest.fixture(scope="session")
def ranks() -> Iterator[SpawnedRanks]:
    server = SpawnedRanks() if torch.cuda.is_available() else Ranks()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and data on which the loss falls quickly: words of a small grammar."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def write_tiny(folder: Path) -> Path:
    """Writes data and configuration of the ``tiny`` fixture; returns the configuration's file."""
    from lightnet_data import manifest
    from lightnet_data.storage import indexed_dataset

    random = np.random.default_rng(0)
    words = [random.integers(1, 12, size=int(n)) for n in random.integers(2, 6, size=12)]
    data = folder / "data"
    data.mkdir()
    module = indexed_dataset()
    facts: dict[str, Any] = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION}
    facts["tokenizer"] = {"vocab_size": 251, "eod_id": 0}
    facts["splits"] = {}
    for split, documents in (("train", 400), ("validation", 40)):
        builder = module.IndexedDatasetBuilder(str(data / f"{split}.bin"), dtype=np.uint16)
        total = 0
        for _ in range(documents):
            text = np.concatenate([words[i] for i in random.integers(0, 12, size=int(random.integers(1, 20)))])
            tokens = np.append(text, 0)
            builder.add_document(tokens.astype(np.uint16), [len(tokens)])
            total += len(tokens)
        builder.finalize(str(data / f"{split}.idx"))
        facts["splits"][split] = {"documents": documents, "tokens": total, "bytes": 3 * total}
    manifest.save(data, facts)
    config = folder / "tiny.yaml"
    config.write_text(
        f"""
model: {{layers: 4, width: 64, heads: 4, glu_width: 90, vocab_size: 251, gate_rank: 8, tpe_rank: 8, tpe_init_length: 64,
  norm_eps: 1.0e-2}}
data: {{path: {data}, sequence_length: 64}}
train: {{steps: 20, global_batch: 8, micro_batch: 2, precision: fp32, seed: 7}}
optimizer: {{learning_rate: 1.0e-3, eps: 1.0e-6, clip: 0.4}}
schedule: {{kind: cosine, warmup_steps: 3}}
parallel: {{zero_stage: 1}}
validation: {{interval: 10, samples: 5}}
checkpoint: {{interval: 0}}
logging: {{interval: 1}}
"""
    )
    return config
