"""The command: what to measure, the order, the files, the verdict."""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import cases, companions
from .first_call import run_first_calls
from .measure import TIMING, Clock, ceilings
from .peers import run_peers
from .plot import draw
from .scans import Context, run_scan
from .series import run_cost, run_figure

Case = Callable[[Context], dict[str, Any]]
REASONS = ("backend_reason", "two_passes_reason")


def all_cases() -> dict[str, Case]:
    """Everything that can be measured with this package, in the order of running."""
    table: dict[str, Case] = {case.name: functools.partial(run_scan, case=case) for case in cases.SCANS}
    if companions.find("decode", "decode_step"):
        from .decode import run_decode

        table["decode"] = run_decode
    for name in companions.names():
        table[name] = functools.partial(companions.run_companion, name=name)
    for case in cases.FIGURE_CASES:
        table[case.name] = functools.partial(run_figure, case=case)
    table["cost"] = functools.partial(run_cost, case=cases.COST_CASE)
    table["first-call"] = run_first_calls
    return table


def add_peers(context: Context, row: dict[str, Any], limit: float) -> None:
    """Peers of a scan's row, or SDPA at the points of a series while it takes less than half a second a call."""
    case = next(
        (case for case in [*cases.SCANS, cases.COST_CASE, *cases.FIGURE_CASES] if case.name == row["case"]), None
    )
    if case is None:
        return
    case = context.fit(case)
    torch.cuda.empty_cache()
    if "points" not in row:
        row["peers"] = run_peers(case, context.device, limit)
        for name, peer in row["peers"].items():
            print(f"    {name:14s} {describe_times(peer)}", flush=True)
        return
    for point in row["points"]:
        sized = case.sized(point["batch"], point["tokens"])
        point["peers"] = run_peers(sized, context.device, limit, ["sdpa"])
        peer = point["peers"]["sdpa"]
        print(f"    N {point['tokens']:7,d} sdpa {describe_times(peer)}", flush=True)
        if "error" in peer or peer["forward_backward"]["ms"] > 500:
            break


def describe_times(measured: dict[str, Any]) -> str:
    if "error" in measured:
        return str(measured["error"])
    parts = []
    for name in ("forward", "forward_backward"):
        if name in measured:
            time_ = measured[name]
            ahead = "" if time_["device_ms"] is None else f" (device {time_['device_ms']:.3f})"
            floor = f", {time_['gb_s']:.0f} GB/s, {time_['tflop_s']:.0f} TFLOP/s" if "gb_s" in time_ else ""
            floor += f", floor {time_['floor_ms']:.3f}" if "floor_ms" in time_ else ""
            parts.append(f"{name.replace('_', '+')} {time_['ms']:.3f} ms{ahead}{floor}")
    return "  ".join(parts)


def describe_check(name: str, result: dict[str, Any]) -> str:
    value = "not measured" if result["value"] is None else f"{result['value']:.4g} {result['unit']}".strip()
    text = f"{name}: {result['what']} {value}, bar {result['bar']:.4g} {result['unit']}".strip()
    if result["value"] and result["bar"]:
        text += f" ({result['value'] / result['bar']:.2f} times the bar)"
    return text


def new_report(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    versions = {"torch": torch.__version__}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    for package in ("triton", "flash-linear-attention"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (smoke run, no figures)",
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arguments": arguments,
        "timing": TIMING,
        "bars_are_for": "one H100 80 GB, bf16",
        "ceilings": {},
        "results": [],
    }


def default_output(report: dict[str, Any]) -> Path:
    """benchmarks/kernels-CARD-DATE-TIME.json: a later run never overwrites an earlier one."""
    card = "-".join("".join(c if c.isalnum() else " " for c in report["card"].lower()).split())
    moment = report["date"][:16].replace(":", "").replace("T", "-")
    return Path("benchmarks") / f"kernels-{card}-{moment}.json"


def write(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a run that is killed leaves what it had measured."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def measure(context: Context, names: list[str], report: dict[str, Any], path: Path, peer_limit: float | None) -> None:
    """Run the cases one by one; an error in one is kept in its row, and the next one starts."""
    table = all_cases()
    for name in names:
        start = time.perf_counter()
        print(f"{name} ...", flush=True)
        row: dict[str, Any] = {"case": name}
        try:
            row.update(table[name](context))
            if "forward" in row:
                print(f"    {row['backend']:14s} {describe_times(row)}", flush=True)
            if "pytorch" in row:
                print(f"    {'pytorch':14s} {describe_times(row['pytorch'])}", flush=True)
            if peer_limit is not None:
                report["results"].append(row)
                write(report, path)
                report["results"].pop()
                add_peers(context, row, peer_limit)
        except Exception as error:  # one failing kernel must not hide the others
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        if context.clock.on_gpu:
            torch.cuda.empty_cache()
            refused = refusal(row)
            if refused is not None:  # the figures are PyTorch's, which no bar may let pass
                row.setdefault("error", f"Triton refused: {refused}")
        row["seconds"] = round(time.perf_counter() - start, 1)
        report["results"].append(row)
        write(report, path)
        missed = sum(not result["met"] for result in row.get("checks", []))
        state = row.get("error") or (f"{missed} missed" if missed else "all met")
        print(f"    {len(row.get('checks', []))} checks, {state}; {row['seconds']} s", flush=True)


def refusal(row: dict[str, Any]) -> str | None:
    """Why a row was measured without Triton."""
    parts = [row, *row.get("calls", {}).values()]
    return next((str(part[key]) for part in parts for key in REASONS if part.get(key)), None)


def verdict(report: dict[str, Any]) -> int:
    """Print what is wrong and what is missed; the exit status."""
    wrong: list[str] = []
    missed: list[str] = []
    aims: list[str] = []
    for row in report["results"]:
        if "error" in row:
            wrong.append(f"{row['case']}: {row['error']}")
        for result in row.get("checks", []):
            if not result["met"]:
                (wrong if result["wrong"] else missed).append(describe_check(row["case"], result))
            elif result["aim"] is not None and result["bar"] is not None and result["value"] > result["aim"]:
                aims.append(f"{row['case']}: {result['what']} {result['value']:.4g}, aim {result['aim']:.4g}")
    for title, lines in (("wrong", wrong), ("missed bars", missed), ("met, but beyond the aim", aims)):
        if lines:
            print(f"{title}:", *(f"  {line}" for line in lines), sep="\n")
    if not wrong and not missed:
        print("every result right, every bar met")
    return 1 if wrong or missed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lightnet_kernels.bench",
        description="The kernels on this GPU: correctness, then speed, memory and first calls, against bars and peers. "
        "Exit 0: all right and within the bars; 1: a wrong result or a missed bar; 2: could not run.",
        epilog=f"cases: {', '.join(all_cases())}",
    )
    parser.add_argument("--peers", action="store_true", help="also run peers on the same inputs")
    parser.add_argument("--peer-seconds", type=float, default=280, metavar="S", help="limit of each peer at each shape")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases")
    parser.add_argument("--quick", action="store_true", help="every second length of the series, fewer first calls")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the JSON (default: benchmarks/kernels-CARD-DATE.json)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="only draw the pictures of a kept JSON; no GPU needed"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a smoke run at tiny sizes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.plot:
            pictures = kept_plots(options.plot)
            print(
                *(f"written: {path}" for path in pictures) if pictures else ("no case with points, no picture",),
                sep="\n",
            )
            return 0
        unknown = sorted(set(options.only or []) - set(all_cases()))
        if unknown:
            raise ValueError(f"--only: no case {', '.join(unknown)}; the cases are {', '.join(all_cases())}")
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "no CUDA device: the bars are for a GPU; --device cpu runs the plumbing at tiny sizes, and --plot FILE "
                "draws a kept result"
            )
        if options.output is not None and options.output.is_dir():
            raise ValueError(
                f"--output {options.output}: is a folder; name a file, such as {options.output / 'kernels.json'}"
            )
        return run(options, sys.argv[1:] if arguments is None else arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    report = new_report(device, arguments)
    path = options.output or default_output(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    clock = Clock(device, repeats=30 if device.type == "cuda" else 2)
    report["ceilings"] = ceilings(clock)
    context = Context(clock, report["ceilings"], options.quick)
    print(
        f"{report['card']}, {report['versions']}, copy {report['ceilings']['copy_tb_s']:.2f} TB/s, bf16 product "
        f"{report['ceilings']['matmul_tflop_s']:.0f} TFLOP/s\n{TIMING}\nwriting {path}",
        flush=True,
    )
    if device.type == "cuda" and "H100" not in report["card"]:
        print("the bars are for an H100 80 GB, and this card is none: read them as a comparison only", flush=True)
    names = [name for name in all_cases() if options.only is None or name in options.only]
    measure(context, names, report, path, options.peer_seconds if options.peers else None)
    try:
        for picture in plots(report, path):
            print(f"written: {picture}")
    except ValueError as error:
        print(f"no pictures: {error}")
    print(f"written: {path}")
    return verdict(report)


def kept_plots(path: Path) -> list[Path]:
    """The pictures of a kept JSON.

    Raises:
        ValueError: it is no result of this command.
    """
    try:
        return plots(json.loads(path.read_text()), path)
    except OSError as error:
        raise ValueError(
            f"--plot {path}: {error.strerror}; name a result of this command, such as benchmarks/kernels-*.json"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"--plot {path}: is no result of this command ({error!r}); name one that it has written"
        ) from None


def plots(report: dict[str, Any], path: Path) -> list[Path]:
    try:
        return draw(report, path)
    except ImportError as error:
        raise ValueError(
            f"drawing needs matplotlib ({error}); pip install matplotlib, then --plot {path}, which needs no GPU"
        ) from None
