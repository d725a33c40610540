"""Where a rank is: step, phase, and, when it does not move, the collective it waits in."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

_LIBRARIES = (
    "/site-packages/",
    "/torch/",
    "/deepspeed/",
    "/megatron/",
    "/contextlib.py",
    "/threading.py",
    "/selectors.py",
)
_ROOT = str(Path(__file__).resolve().parents[2]) + os.sep


class Progress:
    """What the main thread notes as it goes; notes cost an assignment, other threads read them.

    Attributes:
        phase: "start", "step", "bookkeeping", "validation", "evaluation", "save" or "end".
        step: number of the step, from 1; 0 before the first.
        detail: what of the phase, such as "forward of micro-batch 3".
        since: when the phase began, monotonic seconds.
        moved: when the last note was made.
        recent: seconds of the last 50 steps, since they had so many samples.
        samples: of the present step.
    """

    def __init__(self) -> None:
        self.phase, self.step, self.detail, self.samples = "start", 0, "", 0
        self.since = self.moved = time.monotonic()
        self.recent: deque[float] = deque(maxlen=50)

    def begin(self, phase: str, step: int | None = None, samples: int | None = None) -> None:
        """A phase begins; the one before it has ended. Of a step, how many samples it has."""
        now = time.monotonic()
        if self.phase == "step":
            self.recent.append(now - self.since)
        if samples is not None and samples != self.samples:
            if samples > self.samples:
                self.recent.clear()  # what smaller steps took says nothing about this one
            self.samples = samples
        self.phase, self.detail = phase, ""
        self.step = self.step if step is None else step
        self.since = self.moved = now

    def note(self, detail: str) -> None:
        """Something within the phase."""
        self.detail, self.moved = detail, time.monotonic()

    def __str__(self) -> str:
        name = f"step {self.step}" if self.phase == "step" else f"{self.phase} after step {self.step}"
        return f"{name}, {self.detail}" if self.detail else name


def _place(frame: FrameType) -> str:
    name = frame.f_code.co_filename.removeprefix(_ROOT)
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"


def waiting_in() -> tuple[str | None, str]:
    """The collective that a thread of this process is in, by torch.distributed's name, and the place in our code.

    With CUDA a collective runs on the device while the main thread waits somewhere else: then the first is None, unless
    torch's flight recorder knows, see :func:`device_collective`.
    """
    collective, place = None, ""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    for thread in sorted(frames, key=lambda ident: ident != main):
        frame: FrameType | None = frames[thread]
        if thread == threading.get_ident():
            continue
        inside = None
        while frame is not None:
            path = frame.f_code.co_filename
            if path.endswith("torch/distributed/distributed_c10d.py"):
                inside = frame.f_code.co_name  # the outermost one is the one that was called
            elif frame.f_code.co_name == "wait" and "/deepspeed/" in path:
                inside = inside or "a wait for an asynchronous collective"
            elif not any(part in path for part in _LIBRARIES):
                break
            frame = frame.f_back
        if thread == main and frame is not None:
            place = _place(frame)
        if inside is not None and collective is None:
            collective = inside
    return collective, place


def device_collective() -> str | None:
    """The oldest collective that NCCL has not finished, from torch's flight recorder."""
    trace = flight_recorder(active=True)
    entries = [e for e in (trace or {}).get("entries", []) if e.get("state") != "completed"]
    if not entries:
        return None
    first = entries[0]
    name = str(first.get("profiling_name", "a collective")).removeprefix("nccl:")
    return f"{name} number {first.get('collective_seq_id', '?')} on the device"


def flight_recorder(active: bool) -> dict[str, Any] | None:
    """torch's record of this rank's collectives (NCCL only; TORCH_FR_BUFFER_SIZE says how many it keeps)."""
    import json

    if not torch.cuda.is_available():
        return None
    module = torch._C._distributed_c10d
    dump = getattr(module, "_dump_fr_trace_json", None) or getattr(module, "_dump_nccl_trace_json", None)
    try:
        return json.loads(dump(includeCollectives=True, onlyActive=active)) if dump is not None else None
    except (RuntimeError, ValueError, TypeError):
        return None


def collectives_entered() -> dict[str, tuple[int, list[int]]]:
    """By process group: how many collectives this rank has entered, and the ranks of the group."""
    found = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) > 1:
                found[group.group_name] = (int(group._get_sequence_number_for_group()), ranks)
        except (RuntimeError, ValueError, KeyError):  # a backend without numbers, a group that is being destroyed
            continue
    return found


def _namespace() -> str:
    """Where a process id means something: host name, the kernel's boot and the namespace of process ids. Containers and
    copies of a virtual machine may share the first."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return socket.gethostname()


def _born(pid: int) -> float:
    """When a process began, in the kernel's ticks since boot: a clock that is set does not move them."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return psutil.Process(pid).create_time()  # no Linux, or gone
    return float(text.rpartition(")")[2].split()[19])


class Identity:
    """Host, process id and start of a rank: what tells a live rank from a dead one on the same host."""

    def __init__(self) -> None:
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.namespace, self.born = _namespace(), _born(os.getpid())

    def as_dict(self) -> dict[str, Any]:
        """For a record that travels as JSON."""
        return {"host": self.host, "namespace": self.namespace, "pid": self.pid, "born": self.born}

    def shares(self, record: dict[str, Any]) -> bool:
        """Whether a record's process id can be looked up here."""
        return bool(record["namespace"] == self.namespace)

    def process_of(self, record: dict[str, Any]) -> psutil.Process | None:
        """The live process of another rank's record, or None when it is gone; only for records that this host shares."""
        try:
            process = psutil.Process(record["pid"])
            if _born(process.pid) != record["born"] or process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process
        except (psutil.Error, OSError):
            return None
