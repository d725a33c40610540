"""The words and numbers of the page, run by run."""

from __future__ import annotations

import base64
import math
import shlex
import statistics
import time
from typing import Any

from .read import Run, is_number

EVENTS_SHOWN = 40
BASELINE_COLOR = "#8b95a1"
UNITS = {"classifier": "nats an image", "denoiser": "objective"}


def unit(run: Run) -> str:
    """What the losses of a run are in."""
    return UNITS.get(str(run.section("model").get("head")), "nats a token")


def view(run: Run, color: str, several: bool) -> dict[str, Any]:
    """Everything that the template shows of a run beside its charts."""
    tiles = _tiles(run)
    events = [event for event in run.events if event.get("event") != "saved"] or run.events
    return {
        "name": run.name,
        "color": color,
        "suffix": f": {run.name}" if several else "",
        "summary": summary(run),
        "tiles": tiles,
        "by_label": dict(tiles),
        "heldout": _heldout(run, color),
        "sample": run.sample,
        "pictures": [(name, base64.b64encode(data).decode()) for name, data in run.pictures],
        "events": [_event(event) for event in events[-EVENTS_SHOWN:]],
        "more_events": max(0, len(events) - EVENTS_SHOWN),
        "environment": _environment(run),
        "config": run.config_text,
    }


def summary(run: Run) -> str:
    """One line: how far the run came and where its losses stand."""
    damaged = [f"unreadable lines left out: {run.damaged}"] if run.damaged else []
    if not run.steps:
        return ", ".join(["no training step was written down yet", *damaged])
    last = run.steps[-1]
    budget = run.section("train").get("steps")
    parts = [f"step {last['step']:,}" + (f" of {budget:,}" if isinstance(budget, int) else "")]
    if last.get("tokens"):
        parts.append(f"{quantity(last['tokens'])} tokens")
    lost = _lost(run)
    parts.append(f"train loss {last['loss']:.4f}" if lost is None else f"train loss not a number from step {lost:,} on")
    for name, (_, losses) in run.validation_series("loss").items():
        parts.append(f"{name} {losses[-1]:.4f}")
    ends = [event for event in run.events if event.get("event") in ("finished", "stopped")]
    if ends:
        parts.append(f"{ends[-1]['event']} at step {ends[-1]['step']:,}")
    resumes = sum(event.get("event") == "resumed" for event in run.events)
    if resumes:
        parts.append("resumed once" if resumes == 1 else f"resumed {resumes} times")
    return ", ".join([*parts, *damaged])


def quantity(value: float) -> str:
    """A count in three digits: 950, 1.23k, 45.6M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _tiles(run: Run) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if run.steps:
        last = run.steps[-1]
        found.append(("steps", f"{last['step']:,}"))
        if last.get("tokens"):
            found.append(("tokens", quantity(last["tokens"])))
    losses = [(step, value) for step, value in zip(*run.series("loss"), strict=True) if math.isfinite(value)]
    if losses:
        step, value = losses[-1]
        where = "" if _lost(run) is None else f" at step {step:,}"
        found.append((f"last train loss, {unit(run)}", f"{value:.4f}{where}"))
    for name, (_, values) in run.validation_series("loss").items():
        found.append((f"best {name} loss, {unit(run)}", f"{min(values):.4f}"))
    if run.heldout and isinstance(run.heldout.get("bits_per_byte"), (int, float)):
        found.append(("held-out bits per byte", f"{run.heldout['bits_per_byte']:.4f}"))
    speeds = [value for value in run.series("tokens_per_second")[1] if value > 0]
    if speeds:
        found.append(("tokens per second, median", quantity(statistics.median(speeds))))
    memory = run.series("memory_bytes")[1]
    if memory:
        found.append(("peak memory", f"{max(memory) / 1e9:.2f} GB"))
    pauses = [save["pause_seconds"] for save in run.saves if isinstance(save.get("pause_seconds"), (int, float))]
    if pauses:
        found.append(("pause for a checkpoint, median", f"{statistics.median(pauses):.3g} s"))
    beside = [
        (save["step_seconds_while_writing"], save["step_seconds"])
        for save in run.saves
        if all(is_number(save.get(name)) for name in ("step_seconds_while_writing", "step_seconds"))
    ]
    if beside:
        while_writing, alone = (statistics.median(values) for values in zip(*beside, strict=True))
        found.append(("a step while a checkpoint is written, median", f"{while_writing:.3g} s; {alone:.3g} s without"))
    times = [row["time"] for row in run.steps if isinstance(row.get("time"), (int, float))]
    if len(times) > 1:
        found.append(("first to last step, pauses between starts included", duration(times[-1] - times[0])))
    return found


def _lost(run: Run) -> int | None:
    """The step from which on no train loss is a number, None where the last one is."""
    first = None
    for row in reversed(run.steps):
        if is_number(row["loss"]) and math.isfinite(row["loss"]):
            break
        first = row["step"]
    return first


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 20 s or 5 h 10 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _heldout(run: Run, color: str) -> dict[str, Any] | None:
    facts = run.heldout
    if not facts or not isinstance(facts.get("bits_per_byte"), (int, float)):
        return None
    bars = [("LightNet", float(facts["bits_per_byte"]), color)]
    for name, baseline in (facts.get("baselines") or {}).items():
        if isinstance(baseline, dict) and isinstance(baseline.get("bits_per_byte"), (int, float)):
            bars.append((str(name), float(baseline["bits_per_byte"]), BASELINE_COLOR))
    widest = max(value for _, value, _ in bars) or 1.0
    rows = [(name, f"{value:.4f}", round(100 * value / widest, 1), shade) for name, value, shade in bars]
    note = [
        f"{facts.get('data', 'held-out text')}: {facts.get('documents', 0):,} documents",
        f"{facts.get('bytes', 0):,} bytes",
    ]
    if isinstance(facts.get("perplexity"), (int, float)):
        note.append(f"perplexity {facts['perplexity']:.3f} a token over {facts.get('tokens', 0):,} tokens")
    if isinstance(facts.get("word_perplexity"), (int, float)):
        note.append(f"{facts['word_perplexity']:.3f} a word")
    note.append("the model also pays for the end of every document, the compressors do not")
    note.append(f"weights of {facts.get('checkpoint', 'an unnamed checkpoint')}")
    return {"rows": rows, "note": "; ".join(note) + "."}


def _event(event: dict[str, Any]) -> dict[str, str]:
    facts = {key: value for key, value in event.items() if key not in ("step", "time", "event")}
    return {
        "step": f"{event['step']:,}",
        "name": str(event["event"]),
        "time": _moment(event.get("time")),
        "facts": ", ".join(f"{key} {value}" for key, value in facts.items()),
    }


def _moment(when: Any) -> str:
    """Local time of seconds since 1970; nothing where that is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if is_number(when) else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _environment(run: Run) -> list[tuple[str, str]]:
    """The last start in full; earlier ones by time and commit."""
    if not run.environments:
        return []
    last = run.environments[-1]
    rows: list[tuple[str, str]] = []
    for name, value in last.items():
        if name == "command" and isinstance(value, list):
            rows.append((name, shlex.join(str(part) for part in value)))
        elif name == "git":
            rows.append(("commit", _commit(value)))
        elif isinstance(value, dict):
            rows.append((name, ", ".join(f"{key} {part}" for key, part in value.items())))
        else:
            rows.append((name, str(value)))
    for number, earlier in enumerate(run.environments[:-1], 1):
        rows.append((f"start {number}", f"{earlier.get('started', '')} {_commit(earlier.get('git'))}".strip()))
    return rows


def _commit(git: Any) -> str:
    if not isinstance(git, dict):
        return "not a git checkout"
    return f"{git.get('commit')}" + (f" with changes ({git['diff']})" if git.get("diff") else "")
