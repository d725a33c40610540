"""``lightnet doctor``: what is here, what works, what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import click

PACKAGE = "lightnet-llm"
IMPORTS = ("deepspeed", "megatron.core")  # heavy, with native parts: tried in a process of their own
IMPORT_SECONDS = 120
TOLERANCE = {"reference": 1e-12, "torch": 1e-4}  # relative, of fp32 against the fp64 definition
LOOSE = 1e-2  # of backends that may multiply in TF32


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON, and only that, on standard output.")
def doctor(as_json: bool) -> None:
    """Check versions, devices, backends and the scan itself; exit 1 when something that training needs is broken.

    What an extra lacks is reported and is no error.
    """
    found = examine()
    click.echo(json.dumps(found, indent=1) if as_json else _page(found))
    sys.exit(0 if found["ok"] else 1)


def examine() -> dict[str, Any]:
    """All findings by section; ``problems`` lists what is broken, ``ok`` is whether there is none."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # imports in half the time; nothing is compiled here
    start = time.perf_counter()
    imports = _start_imports()
    problems: list[str] = []
    required, extras = _requirements()
    for name, facts in required.items():
        if facts["problem"]:
            problems.append(f"{name}: {facts['problem']}; pip install '{name}{facts['wanted']}'")
    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            PACKAGE: _version(PACKAGE),
            **{name: facts["version"] for name, facts in required.items()},
        },
        "extras": extras,
        "system": _system(),
    }
    try:
        found["devices"] = _devices()
        found["backends"], broken = _backends(found["devices"])
        problems += broken
    except Exception as error:  # whatever a broken installation throws is the finding
        problems.append(f"torch: cannot be used ({_short(error)}); install it again")
    found["imports"] = _finish_imports(*imports)
    problems += [f"{name}: {message}" for name, message in found["imports"].items() if message != "ok"]
    found |= {"problems": problems, "ok": not problems, "seconds": round(time.perf_counter() - start, 1)}
    return found


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Required packages with version and problem, and for each extra what it lacks."""
    from packaging.requirements import Requirement

    required: dict[str, dict[str, Any]] = {}
    extras: dict[str, dict[str, Any]] = {}
    try:
        declared = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        lacking = {"version": None, "wanted": "", "problem": "is not installed, only its sources are here"}
        return {PACKAGE: lacking}, {}
    for extra in declared:
        extras[extra] = {"complete": True, "missing": []}
    for line in lines:
        requirement = Requirement(line)
        version = _version(requirement.name)
        problem = None
        if version is None:
            problem = "is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            problem = f"version {version} does not satisfy {requirement.specifier}"
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required[requirement.name] = {
                "version": version,
                "wanted": str(requirement.specifier),
                "problem": problem,
            }
            continue
        for extra in declared:
            if requirement.marker.evaluate({"extra": extra}) and problem:
                extras[extra]["complete"] = False
                extras[extra]["missing"].append(f"{requirement.name}{requirement.specifier}: {problem}")
    return required, extras


def _start_imports() -> tuple[subprocess.Popen[str], float]:
    """Import the heavy packages beside our own checks; a crash there does not take us along."""
    code = (
        "import importlib, json, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name); result = 'ok'\n"
        "    except BaseException as error: result = f'import fails ({type(error).__name__}: {str(error)[:200]})'\n"
        "    print(json.dumps([name, result]), flush=True)\n"
    )
    import_environment = dict(os.environ)
    if not _nvidia_driver():
        import_environment.setdefault("DS_ACCELERATOR", "cpu")
    process = subprocess.Popen(
        [sys.executable, "-c", code, *IMPORTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=import_environment,
    )
    return process, time.perf_counter()


def _finish_imports(process: subprocess.Popen[str], started: float) -> dict[str, str]:
    try:
        output, _ = process.communicate(timeout=max(1.0, IMPORT_SECONDS - (time.perf_counter() - started)))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    results = dict.fromkeys(IMPORTS, f"import crashed or took more than {IMPORT_SECONDS} s")
    for line in output.splitlines():
        try:
            name, result = json.loads(line)
        except (ValueError, TypeError):
            continue  # packages may print while they are imported
        results[name] = " ".join(result.split())
    return results


def _nvidia_driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def _system() -> dict[str, Any]:
    import psutil

    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "c_compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
        "ninja": shutil.which("ninja"),
        "nvcc": shutil.which("nvcc"),
        "nvidia_driver": _nvidia_driver(),
    }


def _devices() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    cards = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = f"{facts.major}.{facts.minor}"
        cards.append({"name": facts.name, "capability": capability, "memory_gb": round(facts.total_memory / 1e9, 1)})
    communication = [
        name
        for name in ("gloo", "nccl", "mpi")
        if dist.is_available() and getattr(dist, f"is_{name}_available", lambda: False)()
    ]
    return {"cpu_threads": torch.get_num_threads(), "cuda": torch.version.cuda, "gpus": cards, "groups": communication}


def _backends(devices: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Every backend of the scan on every kind of device, held against the definition in fp64."""
    from lightnet_kernels import backends

    places = ["cpu"] + (["cuda"] if devices["gpus"] else [])
    results: dict[str, Any] = {}
    problems = []
    for name in [*backends(), "auto"]:
        for place in places:
            if name == "triton" and place == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                results.setdefault(name, {})[place] = "only under TRITON_INTERPRET=1"
                continue
            try:
                error = self_test(name, place)
            except Exception as problem:  # a backend that cannot run here is a finding, whatever it raises
                outcome, good = f"fails ({_short(problem)})", False
            else:
                good = error <= TOLERANCE.get(name, LOOSE)
                outcome = f"ok (error {error:.1e})" if good else f"wrong (error {error:.1e})"
            results.setdefault(name, {})[place] = outcome
            if not good and name != "triton":  # "auto" fails with it wherever it is the one that training takes
                problems.append(f"scan, backend {name} on {place}: {outcome}; run the tests in tests/unit/kernels")
    if "triton" not in results:
        from lightnet_kernels.companions import without_triton

        results["triton"] = dict.fromkeys(places, without_triton().removeprefix("machines "))
    return results, problems


def self_test(backend: str, device: str) -> float:
    """Largest relative error of ``additive_scan``: output, gradients and a split by state, against fp64.

    The reference backend is run in fp64 itself, which leaves only the split to be checked.
    """
    import torch
    from lightnet_kernels import additive_scan

    generator = torch.Generator().manual_seed(0)
    tokens, heads, width = 150, 2, 24
    inputs = [torch.randn(1, tokens, heads, width, generator=generator, dtype=torch.float64) for _ in range(4)]
    theta = torch.rand(heads, width, generator=generator, dtype=torch.float64)

    def run(name: str, place: str, kind: torch.dtype) -> list[torch.Tensor]:
        *leaves, upstream = (x.to(place, kind, copy=True) for x in inputs)
        angles = theta.to(place, torch.float32).to(kind)
        for leaf in leaves:
            leaf.requires_grad_()
        whole = additive_scan(*leaves, theta=angles, backend=name)
        assert isinstance(whole, torch.Tensor)
        gradients = torch.autograd.grad(whole, leaves, upstream)
        with torch.no_grad():
            first, state = additive_scan(*(x[:, :70] for x in leaves), theta=angles, return_state=True, backend=name)
            second = additive_scan(*(x[:, 70:] for x in leaves), theta=angles, initial_state=state, backend=name)
            assert isinstance(second, torch.Tensor)
        return [x.detach().double().cpu() for x in (whole, torch.cat([first, second], 1), *gradients)]

    truth = run("reference", "cpu", torch.float64)
    mine = run(backend, device, torch.float64 if backend == "reference" else torch.float32)
    truth[1] = truth[0]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, truth, strict=True))


def _page(found: dict[str, Any]) -> str:
    lines = ["versions"]
    lines += [f"  {name} {version or 'missing'}" for name, version in found["versions"].items()]
    for section in ("system", "devices"):
        lines.append(section)
        for name, value in found.get(section, {}).items():
            if name == "gpus":
                cards = [f"{c['name']} ({c['memory_gb']} GB, capability {c['capability']})" for c in value]
                value = ", ".join(cards) or "none; training runs on the CPU"
            shown = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"  {name.replace('_', ' ')}: {'none' if shown in (None, '') else shown}")
    lines.append("backends of the scan")
    for name, places in found.get("backends", {}).items():
        lines += [f"  {name} on {place}: {outcome}" for place, outcome in places.items()]
    lines.append("imports")
    lines += [f"  {name}: {message}" for name, message in found["imports"].items()]
    lines.append("extras")
    for name, facts in found["extras"].items():
        lacks = "; ".join(facts["missing"])
        hint = f"lacks {lacks}  (pip install '{PACKAGE}[{name}]')"
        lines.append(f"  {name}: " + ("complete" if facts["complete"] else hint))
    lines += [f"problem: {line}" for line in found["problems"]]
    lines.append(f"{'all that training needs works' if found['ok'] else 'broken'} ({found['seconds']} s)")
    return "\n".join(lines)
