"""The script for eight GPUs, as far as it goes without one."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightnet_llm.config import load_config
from lightnet_llm.parallel.legality import legal_layout
from tests.conftest import ROOT, write_tiny

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """eight_gpus, its cases, jobs and sequence_parallel; as those of the benchmarks' folder, for this test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("eight_gpus", "eight_gpus_cases", "sequence_parallel", "jobs", "planner", "steps")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import eight_gpus
    import eight_gpus_cases
    import jobs
    import planner
    import sequence_parallel

    yield SimpleNamespace(
        main=eight_gpus, cases=eight_gpus_cases, jobs=jobs, planner=planner, sequence_parallel=sequence_parallel
    )
    for name in names:
        sys.modules.pop(name, None)


def given(folder: Path, **changed: Any) -> argparse.Namespace:
    fields = {"output": folder, "gpus": 2, "gpu": "h200", "figures": None, "presets": ["pile_150m"], "jobs": 2}
    return argparse.Namespace(**{**fields, **changed})


def kept(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    assert path.name.startswith("eight-gpus-") and path.suffix == ".json"
    return json.loads(path.read_text())


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_layouts_and_moves_are_legal(gpus: int, modules: Any, tmp_path: Path) -> None:
    tiny = str(write_tiny(tmp_path))
    for case in modules.cases.layouts(gpus):
        assert case.ranks == gpus
        legal_layout(load_config(tiny, case.overrides), gpus)
    found = modules.cases.moved(gpus)
    assert [count for _, count, _ in found] == ([1] if gpus == 2 else [gpus // 2, gpus // 4])
    for start, count, after in found:
        for world, more in ((gpus, start), (count, after)):
            legal_layout(load_config(tiny, [*modules.cases.MICRO, *more]), world)


@pytest.mark.parametrize("gpus", [2, 8])
def test_what_would_run_is_shown(gpus: int, modules: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    modules.cases.show(given(tmp_path, gpus=gpus))
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert set(lines) == {*modules.main.PARTS}
    assert lines.count("speed") == 3 and lines.count("buckets") == 12 and lines.count("parity") >= 6


@pytest.mark.parametrize(
    ("most", "wanted", "least"),
    [(5_000_000, 4_980_736, 5_242_880), (1_000_000, 983_040, 1_048_576), (1, None, 131_072)],
)
def test_the_longest_sequence(
    most: int, wanted: int | None, least: int, modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(_job: Any, request: dict[str, Any], cards: list[int], seconds: float) -> dict[str, Any]:
        assert cards == [0, 1] and seconds <= 150
        if request["tokens"] > most:
            return {"failed": "out of memory"}
        return {"ms": 1.0, "memory_gb": 1.0, "bytes_sent_per_layer": 0, "losses": [2.0, 1.0]}

    monkeypatch.setattr(modules.sequence_parallel, "run_job", train)
    good = modules.main.run("longest", given(tmp_path))
    found = kept(tmp_path)
    last = found["rows"][-1]
    assert good is found["good"] is (wanted is not None)
    assert last["too_long"] >= least and (last["longest"] or 0) <= (wanted or 0) <= most
    if wanted is not None:  # to a sixteenth of the last doubling
        assert last["longest"] <= most < last["too_long"] and last["too_long"] - last["longest"] <= last["too_long"] / 4


@pytest.mark.parametrize(
    ("failure", "limit", "said"), [("NCCL error", 540.0, "NCCL error"), ("out of memory", 0.0, "time is up")]
)
def test_what_is_no_lack_of_memory_ends_the_search(
    failure: str, limit: float, said: str, modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(modules.sequence_parallel, "run_job", lambda *_: {"failed": failure})
    monkeypatch.setattr(modules.cases, "LIMIT", limit)
    assert not modules.main.run("longest", given(tmp_path))
    assert said in kept(tmp_path)["rows"][-1]["failed"] and kept(tmp_path)["rows"][-1]["longest"] is None


def test_a_layout_that_does_not_train_is_a_row(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Faulty:
        def __init__(self, *_: Any) -> None: ...

        def get(self, model: list[str]) -> None: ...

        def run(self, case: Any) -> Any:
            if case.sequence > 1:
                raise AssertionError("exit codes [1, 1]\nRuntimeError: the cause")
            return modules.main.Matrix, case

    result = SimpleNamespace(loss=1e-7, norm=1e-6, fall=2.0, seconds=1.0, problem="")
    monkeypatch.setattr(Faulty, "run", _or(Faulty.run, result))
    monkeypatch.setattr(modules.main, "Matrix", Faulty)
    monkeypatch.setattr(modules.main, "line", lambda found: "a line")
    monkeypatch.setattr("tests.conftest.Ranks", lambda: None)
    assert not modules.main.run("parity", given(tmp_path))
    found = kept(tmp_path)
    assert len(found["rows"]) == len(modules.cases.layouts(2)) and found["good"] is False
    (problem,) = [row["problem"] for row in found["rows"] if row["problem"]]
    assert "the cause" in problem and "the cause" in capsys.readouterr().out


def _or(run: Any, result: Any) -> Any:
    def call(self: Any, case: Any) -> Any:
        run(self, case)
        return result

    return call


def test_predictions_stand_beside_what_was_measured(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a part that is cut off as well."""
    ran: list[dict[str, Any]] = []

    def run_job(_job: Any, request: dict[str, Any], cards: list[int], seconds: float) -> dict[str, Any]:
        if ran:
            assert kept(tmp_path)["good"] is None and len(kept(tmp_path)["rows"]) == len(ran)
        ran.append(request)
        if len(ran) == 2:
            return {"failed": "out of memory"}
        return {"step_seconds": 0.5, "allocated_bytes": [10**9] * len(cards)}

    monkeypatch.setattr(modules.planner, "run_job", run_job)
    assert not modules.main.run("scaling", given(tmp_path))
    found = kept(tmp_path)
    assert [row["ranks"] for row in found["rows"]] == [1, 2, 1, 2] and all(request["profile"] for request in ran)
    assert sum("failed" in row["measured"] for row in found["rows"]) == 1
    for row in found["rows"]:
        assert row["predicted"]["allocated_bytes"] > 10**9 and row["predicted"]["step_seconds"] > 0.01


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 20), (0.1, 20), (2.0, 15), (30.0, 8)])
def test_long_steps_are_timed_less_often(
    seconds: float, steps: int, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(modules.planner, "run_job", lambda *arguments: asked.append(arguments) or {})
    modules.planner.measure(modules.planner.CASES["1b"], [0], seconds)
    (_, request, _, limit), *_ = asked
    assert request["steps"] == steps and limit > seconds * (request["warm"] + steps)


def test_cards_are_given_back_after_an_error(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ran: list[str] = []

    def run(name: str, cards: list[int]) -> None:
        ran.append(name)
        if name == "first":
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        modules.jobs.side_by_side({"first": 1, "second": 2, "third": 2}, run)
    assert sorted(ran) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("name", "key"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L4", "h100")]
)
def test_predictions_are_for_the_card_at_hand(
    name: str, key: str, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert modules.planner.card_here() == key


SLEEPS = """
import sys, time
sys.path.insert(0, "benchmarks")
import jobs
jobs._SERVER.set_forkserver_preload([])
if __name__ == "__main__":
    jobs.run_job(time.sleep, 600, [0, 0], 600)
"""


def test_ranks_end_with_who_started_them(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    with subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(FOLDER)}
    ) as process:

        def ranks() -> list[int]:
            found = []
            for out in Path("/proc").glob("[0-9]*/environ"):
                try:
                    stat = (out.parent / "cmdline").read_text()
                except OSError:
                    continue
                if "forkserver" in stat and str(FOLDER) in _environment(out):
                    found.append(int(out.parent.name))
            return found

        deadline = time.monotonic() + 90
        while len(ranks()) < 3 and time.monotonic() < deadline:  # two ranks, and what forks them
            time.sleep(0.2)
        begun = ranks()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(begun) >= 3
    while set(ranks()) & set(begun) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not set(ranks()) & set(begun)


def _environment(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_parts_that_need_gpus_say_so() -> None:
    command = [sys.executable, "benchmarks/eight_gpus.py", "parity", "--gpus", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2 and "needs 8 GPUs" in done.stderr
