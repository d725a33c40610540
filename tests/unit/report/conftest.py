"""Run folders as training writes them, with numbers made up."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from lightnet_llm.config import dump_config, validate

Maker = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    def make(name: str, steps: int = 40, rate: float = 3e-4, offset: float = 0.0) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = validate(
            {
                "model": {"layers": 2, "width": 48, "heads": 3, "glu_width": 64, "vocab_size": 330},
                "train": {"name": "made", "steps": steps},
                "optimizer": {"learning_rate": rate},
            },
            "made",
        )
        (folder / "config.yaml").write_text(dump_config(config))
        rows: list[dict[str, object]] = []
        for step in range(1, steps + 1):
            loss = 2.0 + offset + 3.0 * math.exp(-step / 10)
            rows.append(
                {"step": step, "time": 1e9 + step, "loss": loss, "grad_norm": 0.5 + 1 / step, "learning_rate": rate}
                | {"tokens": 512 * step, "samples": [8 * step - 8, 8 * step], "tokens_per_second": 1000.0 + step}
                | {"memory_bytes": 2_000_000_000, "mfu": None}
            )
            if step % 10 == 0:
                held = {"loss": loss + 0.1, "perplexity": math.exp(loss + 0.1), "bits_per_byte": (loss + 0.1) / 3}
                rows.append({"step": step, "time": 1e9 + step, "validation": {"heldout": held}})
                rows.append({"step": step, "time": 1e9 + step, "validation": {"code": {"loss": loss - 0.2}}})
                saved = {"step": step, "pause_seconds": 0.25}
                rows.append({"step": step, "time": 1e9 + step, "checkpoint": saved})
                rows.append({"step": step, "time": 1e9 + step, "event": "saved"})
            if step == 20:
                rows.append({"step": 20, "time": 1e9 + 25, "event": "resumed", "layout": "2 ranks"})
        rows.append({"step": steps, "time": 1e9 + steps, "event": "finished"})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        starts = [
            {"started": "2026-11-01T10:00:00+0000", "command": ["lightnet", "train", "made"], "git": None},
            {"started": "2026-11-01T11:00:00+0000", "command": ["lightnet", "train", "made", "train.name=a b"]}
            | {"versions": {"torch": "2.13.0"}, "git": {"commit": "c0ffee", "diff": "source.diff"}},
        ]
        (folder / "environment.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
        return folder

    return make
