"""Ranks for tests: one import, then forks."""

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # A script's `make test &`: programs under test would inherit deafness.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Ranks:
    """Runs the training main on ranks forked from one process that has imported everything; threads may share it."""

    def __init__(self) -> None:
        # In a session of its own: a signal to whoever asks (Ctrl-C, `timeout`) must not reach ranks, which would save.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        assert json.loads(self.replies.readline())["ready"]
        self.count, self.lock = itertools.count(), threading.Lock()
        self.waiting: dict[int, Future[list[int]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.replies:
            reply = json.loads(line)
            self.waiting.pop(reply["id"]).set_result(reply["codes"])
        for left in list(self.waiting.values()):
            left.set_exception(RuntimeError("the process that forks ranks has ended"))

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
        grace: float | None = None,
        **environment: str,
    ) -> list[int]:
        """Exit codes of ``world`` ranks, each on its own GPU if there are any.

        Ranks that outlive the first that failed by ``grace`` seconds are killed, all of them after 240 s. Those of a run that
        fails leave no process behind, and end within a minute where the fault is planted.
        """
        if 0 < self.gpus() < world:
            pytest.skip(f"needs {world} GPUs")
        if grace is None:
            grace = 10 if self.gpus() else 5
        request = {"world": world, "arguments": arguments, "log": str(log), "plant": plant or "", "timeout": 240}
        request |= {"grace": grace, "environment": environment}
        codes: Future[list[int]] = Future()
        began = time.monotonic()
        with self.lock:
            number = next(self.count)
            self.waiting[number] = codes
            self.requests.write(json.dumps({"id": number, **request}) + "\n")
            self.requests.flush()
        found = codes.result()
        if any(found):
            planted = plant not in (None, "check_shards")  # which is no fault, so that the run may fail at any time
            assert not planted or time.monotonic() - began < 60, f"{plant}: took more than a minute"
            assert not (left := _left_behind(log)), f"{plant}: processes {left} are left"
        return found

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
        """End the server, and what it runs."""
        self.requests.close()
        self.process.wait(timeout=20)


def _left_behind(log: Path) -> list[int]:
    """Processes that write to logs of ranks, after the time in which loaders notice that their rank is gone."""
    deadline = time.monotonic() + 20
    while True:
        found = []
        for out in Path("/proc").glob("[0-9]*/fd/1"):
            with contextlib.suppress(OSError):
                if str(out.readlink()).startswith(f"{log}.rank"):
                    found.append(int(out.parts[2]))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(rows: list[dict[str, Any]], *fields: str) -> dict[int, tuple[Any, ...]]:
    """The named fields of every training step."""
    return {row["step"]: tuple(row[field] for field in fields) for row in rows if "loss" in row}


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    server = Ranks()
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
