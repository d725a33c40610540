"""The first call at a new shape with empty caches of kernels: `python -m lightnet_kernels.bench.first_call REQUEST`.

In a process of its own with a cache folder of its own. Timed from the call to the end of its work on the device;
starting Python, importing, opening the device and making the inputs are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..scan import backends
from .cases import FIRST_CALL_AIM, FIRST_CALL_BAR, SCANS, ScanCase, make_inputs
from .children import packed, run_child, unpacked
from .measure import Clock, check
from .scans import Call, Context, usable_backend

LIMIT = 180.0  # seconds a process
NAMES = ("causal-lrpe", "bidirectional")


def run_first_calls(context: Context) -> dict[str, Any]:
    """Seconds of forward alone, and of forward and backward, each from an empty cache; and milliseconds of the next new
    shape in the same process, where nothing may be compiled or tuned again."""
    calls: dict[str, Any] = {}
    checks = []
    cases = [context.fit(case) for case in SCANS if case.name in NAMES]
    for case in cases if context.clock.on_gpu and not context.quick else cases[:1]:
        small = case.small() if context.clock.on_gpu else case
        backend, reason = usable_backend(small, context.device)
        for kind in ("forward", "forward+backward"):
            with tempfile.TemporaryDirectory() as folder:
                request = {"case": packed(case), "kind": kind, "device": str(context.device), "backend": backend}
                # NVRTC keeps what it compiled, too, beside the driver's own (since CUDA 12.9).
                result = run_child(
                    "first_call", request, LIMIT, {"TRITON_CACHE_DIR": folder, "CUDA_CACHE_DISABLE": "1"}
                )
            seconds = result.get("first_call_s")
            what = f"first call, {case.name}, {kind}"
            bar = FIRST_CALL_BAR if context.clock.on_gpu else None
            checks.append(check(what, seconds, bar, aim=FIRST_CALL_AIM, unit="s"))
            if "error" not in result:
                compiled = result["compiled_for_a_new_shape"]
                checks.append(check(f"kernels compiled for a new N and B, {case.name}, {kind}", compiled, 0))
            calls[f"{case.name}, {kind}"] = {**result, "backend": backend, "backend_reason": reason}
            print(f"    {what}: {result.get('error') or f'{seconds:.2f} s'}", flush=True)
    return {"calls": calls, "checks": checks}


def _kernels() -> int:
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "/nonexistent"))
    return sum(1 for _ in folder.rglob("*.cubin")) if folder.is_dir() else 0


def measure_first_call(case: ScanCase, kind: str, device: torch.device, backend: str) -> dict[str, Any]:
    backends()  # imports Triton
    clock = Clock(device)
    call = Call(case, make_inputs(case, device), backend)
    other = case.sized(max(case.batch // 2 + 1, 1), case.tokens // 2 + 37)
    new = Call(other, make_inputs(other, device), backend)
    work = [(x.forward if kind == "forward" else x.both) for x in (call, new)]
    first = clock.once(work[0])
    compiled = _kernels()
    second = clock.once(work[1])
    return {
        "first_call_s": first / 1e3,
        "kernels_compiled": compiled,
        "new_shape_ms": second,
        "compiled_for_a_new_shape": _kernels() - compiled,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    device = torch.device(asked["device"])
    print(json.dumps(measure_first_call(unpacked(asked["case"]), asked["kind"], device, asked["backend"])))
