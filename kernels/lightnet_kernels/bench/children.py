"""Measurements in a process of their own: what hangs, tunes for minutes or crashes costs that measurement alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .cases import ScanCase

PACKAGES = Path(__file__).resolve().parents[2]


def run_child(module: str, request: dict[str, Any], limit: float, environment: dict[str, str] | None = None) -> Any:
    """The JSON of the last line that `python -m lightnet_kernels.bench.MODULE REQUEST` prints; {"error": why} where it
    fails or takes more than `limit` seconds."""
    paths = os.pathsep.join(x for x in (str(PACKAGES), os.environ.get("PYTHONPATH", "")) if x)
    command = [sys.executable, "-m", f"{__package__}.{module}", json.dumps(request)]
    with subprocess.Popen(
        command,
        env={**os.environ, **(environment or {}), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # compilers it started end with it
    ) as child:
        try:
            output, errors = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return {"error": f"took more than {limit:.0f} s"}
    if child.returncode:
        last = [line for line in errors.strip().splitlines() if line.strip()][-1:] or ["no message"]
        return {"error": f"exit {child.returncode}: {last[0].strip()}"}
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"printed no JSON but {output[-200:]!r}"}


def packed(case: ScanCase) -> dict[str, Any]:
    """The case as JSON holds it; bars stay behind."""
    values = dataclasses.asdict(case)
    return {name: value for name, value in values.items() if name not in ("bar", "aim")}


def unpacked(values: dict[str, Any]) -> ScanCase:
    return ScanCase(**values)
