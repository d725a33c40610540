"""benchmarks/decoding.py runs, at tiny sizes: the peer is of equal size, its caches hold what was put there, figures are kept."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decoding_benchmark", ROOT / "benchmarks" / "decoding.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.json"
    given = "decoding.py --device cpu --quick --batches 1,2 --positions 16,64 --tokens 3 --repeat 1 --output"
    monkeypatch.setattr("sys.argv", [*given.split(), str(target)])
    assert benchmark.main() == 0
    found = json.loads(target.read_text())
    assert len(found["rows"]) == 12 and all(row["tokens_per_second"] > 0 for row in found["rows"])
    assert abs(found["peer_parameters"] / found["parameters"] - 1) < 0.01
    assert set(found["flatness"]) == {"1", "2"}


def test_a_cache_that_does_not_fit_is_said(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "free_bytes", lambda device: 1000)
    given = "decoding.py --device cpu --quick --batches 1 --positions 16 --tokens 1 --repeat 1 --output"
    monkeypatch.setattr("sys.argv", [*given.split(), str(tmp_path / "out.json")])
    benchmark.main()
    rows = {row["model"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert rows["lightnet"]["tokens_per_second"] > 0
    assert rows["llama static"]["tokens_per_second"] is None and "does not fit" in rows["llama static"]["problem"]


def test_flatness_is_of_ours(benchmark: ModuleType) -> None:
    rows: list[dict[str, Any]] = [
        {"model": who, "batch": 1, "position": place, "tokens_per_second": speed}
        for who, place, speed in (("lightnet", 1, 100.0), ("lightnet", 2, 90.0), ("llama static", 2, 10.0))
    ]
    assert benchmark.flat(rows, 1) == pytest.approx(0.1)


@torch.inference_mode()
def test_both_stand_where_they_should(benchmark: ModuleType) -> None:
    """The peer sees its whole cache: static and dynamic agree. Ours counts on from the position."""
    config, device = benchmark.load_config("pile_379m", benchmark.QUICK), torch.device("cpu")
    peer = benchmark.llama(config, 400_000, 64, device, torch.float32)
    logits = []
    for kind in ("dynamic", "static"):
        torch.manual_seed(0)
        step = benchmark.llama_step(peer, kind, 2, 16, 4)
        logits.append([step(torch.tensor([3, 4])) for _ in range(2)])
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-4)
    decoder = benchmark.our_step(benchmark.ours(config, device, torch.float32), 2, 5000)
    decoder(torch.tensor([3, 4]))
    assert decoder.state.layers[0].length.tolist() == [5001, 5001]
