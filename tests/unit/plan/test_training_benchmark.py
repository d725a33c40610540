"""benchmarks/training.py runs, at tiny sizes; what it packs, how it names kernels, when a bar is missed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    """Benchmarks import each other by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 64), (8, 2048), (1, 16384)])
def test_bounds_are_of_rows_and_of_documents(rows: int, length: int) -> None:
    from steps import bounds

    plain = bounds(rows, length, False, 0).tolist()
    assert plain == list(range(0, rows * length + 1, length))
    packed = [bounds(rows, length, True, number).tolist() for number in range(3)]
    for found in packed:
        assert found[0] == 0 and found[-1] == rows * length and found == sorted(set(found)) and set(found) >= set(plain)
    if rows * length > 10_000:
        assert packed[0] != packed[1] and all(len(found) - len(plain) > 10 for found in packed)


def test_all_kernels_of_a_scan_are_its_own() -> None:
    pytest.importorskip("triton")
    from lightnet_kernels import triton_scan, triton_scan_grads
    from steps import own_kernels

    modules = [
        x for scan in (triton_scan, triton_scan_grads) for name, x in vars(scan).items() if name.endswith("kernels")
    ]
    names = {
        name for x in modules for name, kernel in vars(x).items() if getattr(kernel, "__module__", "") == x.__name__
    }
    found = {name: kind for name, kind in own_kernels().items() if name in names}
    assert len(modules) == 5 and {"scan_units", "span_sums", "chain_grads"} <= {*found}
    assert set(found.values()) == {"scan"}


def test_kernels_have_a_kind() -> None:
    from steps import kind, own_kernels

    if own_kernels():  # with Triton
        kinds = {name: kind(name) for name in ("query_grads", "short_forward", "causal_chain")}
        assert set(kinds.values()) == {"scan"}
        assert {"scan", "TPE", "loss", "norms and gates"} <= set(own_kernels().values())
    assert kind("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT") == "products"
    assert kind("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL") == "communication"
    assert kind("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>") == "optimiser"
    assert kind("Memcpy HtoD (Pinned -> Device)") == "copies"
    assert kind("void at::native::vectorized_elementwise_kernel<4, ...>") == "other elementwise"


def test_pauses_of_a_device() -> None:
    from steps import pauses

    spans = [
        (100.0, 110.0, "b"),
        (0.0, 98.0, "a"),  # before b, two microseconds of pause
        (105.0, 150.0, "c"),  # meanwhile, on another stream
        (120.0, 130.0, "d"),
        (250.0, 260.0, "a"),
        (262.0, 300.0, "c"),
        (370.0, 380.0, "a"),
    ]
    assert pauses(spans, 2) == {
        "kernels": 3.5,
        "between_ms": 0.002,
        "long": [{"after": "c", "before": "a", "milliseconds": 0.085, "count": 1.0}],
    }
    assert pauses([], 1) == {"kernels": 0.0, "between_ms": 0.0, "long": []}


def test_bars_are_of_an_h100() -> None:
    from training import missed

    rows: dict[str, dict[str, Any]] = {
        "379m": {"bar": 150_000, "tokens_per_second": 149_000.0},
        "379m-long": {"tokens_per_second": 140_000.0},
        "379m @ llama": {"failed": "time is up"},
        "start": {"first_step_seconds": 61.0},
    }
    assert missed(rows, "NVIDIA H200") == []
    assert missed(rows, "NVIDIA H100 80GB HBM3") == ["379m", "start", "379m-long, more than 5 % from 379m"]
    assert missed({**rows, "1b": {"failed": "out of memory"}}, "cpu") == ["1b"]


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    given = f"--smoke --only 379m 379m-packed start --peers llama --output {target}"
    done = subprocess.run(
        [sys.executable, "benchmarks/training.py", *given.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads(target.read_text())["rows"]
    assert set(rows) == {"start", "379m", "379m @ llama", "379m-packed"}
    assert all(rows[name]["tokens_per_second"] > 0 for name in rows if name != "start")
    assert abs(rows["379m @ llama"]["parameters"] / rows["379m"]["parameters"] - 1) < 0.25, (
        "at this size widths are coarse"
    )
    assert 0 < rows["start"]["first_step_seconds"] < 200
