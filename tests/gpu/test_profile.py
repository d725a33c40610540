"""What a profiler's trace shows of a step on a GPU: its kernels, and how often the host waits (pytest -s prints it)."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks
from tests.gpu.test_saving import LARGER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 3
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as opened:
        return [event for event in json.load(opened)["traceEvents"] if event.get("ph") == "X"]


def test_the_host_does_not_wait_in_every_micro_batch(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    waits = {}
    for micro in (1, 8):
        overrides = [*LARGER, "train.steps=12", f"train.micro_batch={micro}", "validation.interval=0"]
        overrides += ["logging.interval=12", f"logging.profile_steps={STEPS}"]
        ranks.train(1, tiny, overrides, tmp_path, f"run{micro}")
        (file,) = (tmp_path / f"run{micro}" / "profile").iterdir()
        found = events(file)
        assert any(event.get("cat") == "kernel" for event in found)
        waits[micro] = Counter(event["name"] for event in found if event["name"] in WAITS)
        copies = Counter(event["name"] for event in found if event["name"].startswith("Memcpy"))
        print(f"\nmicro_batch {micro}, {STEPS} steps: waits {dict(waits[micro])}, copies {dict(copies)}")
    # Whether a step is bad is known only before its update; nothing else of a step needs the host to know a number.
    per_micro_batch = (waits[1].total() - waits[8].total()) / (STEPS * 7)
    assert per_micro_batch < 0.5, f"{per_micro_batch:.1f} waits of the host a micro-batch"
