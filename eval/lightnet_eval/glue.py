"""GLUE by the paper's rule (section 5.1): every rate of a grid, several seeds, 5 epochs; the best rate's mean is reported.

A run is (task, rate, seed): an ordinary training run in a folder of its own, whose ``result.json`` is written last. So nothing
that was done is done again, and a run that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from lightnet_llm.checkpoint.store import write_text
from lightnet_llm.errors import UserError

from .glue_run import Plan, Trainings, encode, measure, run_config
from .glue_tasks import Found

PAPER = (
    "mnli",
    "sst2",
    "stsb",
    "rte",
    "qnli",
    "qqp",
    "mrpc",
    "cola",
)  # of its average: MNLI counts twice, WNLI is left out
RESULT = "result.json"


def score_of(result: dict[str, Any]) -> float:
    """The mean over held-out sets of the first figure."""
    return statistics.fmean(next(iter(figures.values())) for figures in result["sets"].values())


def _one(
    plan: Plan,
    found: Found,
    data: Path,
    facts: dict[str, Any],
    rate: float,
    seed: int,
    devices: Queue[Any],
    trainings: Trainings,
) -> dict[str, Any]:
    config = run_config(plan, data, facts, rate, seed)
    folder = Path(config["train"]["output"], config["train"]["name"])
    place = folder / RESULT
    wanted = {**plan.as_dict(), "rate": rate, "seed": seed}
    if place.is_file():
        result: dict[str, Any] = json.loads(place.read_text())
        if {key: result.get(key) for key in wanted} != wanted:
            raise UserError(f"{place}: is of other options or another checkpoint; choose another --runs")
        return result
    device = devices.get()
    try:
        trainings.run(config, device)
        result = {**wanted, **measure(folder, found, data)}
    finally:
        devices.put(device)
    write_text(place, json.dumps(result))
    return result


def _drop_checkpoints(plan: Plan, found: Found, results: Iterable[dict[str, Any]]) -> None:
    """Keep those of the best run of a task alone: a grid's would fill a disk."""
    best = max(results, key=score_of)
    for result in results:
        if result is not best:
            name = f"rate{result['rate']:g}_seed{result['seed']}"
            shutil.rmtree(plan.output / found.key / name / "checkpoints", ignore_errors=True)


def evaluate(
    plan: Plan,
    tasks: list[Found],
    processes: int = 1,
    keep_all: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Fine-tune and measure the grid.

    Args:
        processes: runs at a time; each has a GPU for itself where there are any.
        keep_all: keep every run's checkpoints, not only those of a task's best.
        say: told of every run that is done.

    Returns:
        tasks: by key, see :func:`summary`; average: the paper's, of its tasks, None unless all are there.
    """
    gpus = torch.cuda.device_count()
    if gpus and processes > gpus:
        raise UserError(
            f"--processes {processes}: there are {gpus} GPUs, and each run has one for itself; use {gpus} or fewer"
        )
    devices: Queue[Any] = Queue()
    trainings = Trainings()
    for index in range(processes):
        devices.put(index if gpus and processes > 1 else None)
    encoded = {found.key: encode(found, plan) for found in tasks}
    report: dict[str, Any] = {**plan.as_dict(), "rates": list(plan.rates), "seeds": plan.seeds, "tasks": {}}
    grid = [(rate, seed) for rate in plan.rates for seed in range(plan.seeds)]
    with ThreadPoolExecutor(processes) as pool:
        waiting = {
            found.key: [
                pool.submit(_one, plan, found, *encoded[found.key], rate, seed, devices, trainings)
                for rate, seed in grid
            ]
            for found in tasks
        }
        try:
            for found in tasks:
                results = []
                for future in waiting[found.key]:
                    results.append(future.result())
                    last = results[-1]
                    say(f"{found.task.name} rate {last['rate']:g} seed {last['seed']}: {_shown(last['sets'])}")
                    if not keep_all:
                        _drop_checkpoints(plan, found, results)
                facts = encoded[found.key][1]
                report["tasks"][found.key] = {"name": found.task.name, **summary(results), "data": facts["splits"]}
                report["tasks"][found.key]["classes"] = facts["classes"]
        except BaseException:
            trainings.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report["average"] = average(report["tasks"])
    return report


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The best rate of a task's runs, by the mean over seeds of the score.

    Returns:
        rate: the best. score: its mean, deviation: the standard deviation over its seeds (None of one). sets: means of every
        figure at that rate. by_rate: means of all rates. runs: all results.
    """
    by_rate: dict[float, list[float]] = {}
    for result in results:
        by_rate.setdefault(result["rate"], []).append(score_of(result))
    rate = max(by_rate, key=lambda each: statistics.fmean(by_rate[each]))
    best = [result["sets"] for result in results if result["rate"] == rate]
    sets = {
        name: {k: statistics.fmean(run[name][k] for run in best) for k in figures} for name, figures in best[0].items()
    }
    scores = by_rate[rate]
    return {
        "rate": rate,
        "score": statistics.fmean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "sets": sets,
        "by_rate": {f"{each:g}": statistics.fmean(values) for each, values in by_rate.items()},
        "runs": results,
    }


def average(tasks: dict[str, Any]) -> float | None:
    """The paper's last column: its nine figures, of which MNLI has two, without WNLI."""
    if any(key not in tasks for key in PAPER):
        return None
    return statistics.fmean(next(iter(s.values())) for key in PAPER for s in tasks[key]["sets"].values())


def _shown(sets: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{k} {100 * v:.1f}" for k, v in figures.items()) for name, figures in sets.items()
    )


def table(report: dict[str, Any]) -> str:
    """The report for reading, in hundredths."""
    lines = []
    for task in report["tasks"].values():
        spread = "" if task["deviation"] is None else f" +- {100 * task['deviation']:.1f}"
        rates = ", ".join(f"{rate}: {100 * value:.1f}" for rate, value in task["by_rate"].items())
        lines.append(
            f"{task['name']:8} {100 * task['score']:5.1f}{spread}  at rate {task['rate']:g} ({_shown(task['sets'])})"
        )
        lines.append(f"{'':8} means over {report['seeds']} seeds by rate: {rates}")
    if report["average"] is not None:
        lines.append(f"GLUE     {100 * report['average']:5.1f}  the paper's average: MNLI twice, without WNLI")
    return "\n".join(lines)
