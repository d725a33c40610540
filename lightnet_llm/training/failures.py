"""Why a run ended, written by its ranks for the supervisor that started them, and the exit codes they leave with."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

# A folder of one attempt, on a file system that all hosts share; set by the supervisor, absent in a run by hand.
VARIABLE = "LIGHTNET_FAILURES"
REFUSED, FAILED, HUNG = 1, 70, 75  # exit codes: the user must act; a rank broke; a watchdog ended the run
STOPPED = 85  # of a pod, never of a rank: asked to stop before the end, saved, and to be started again
ENDED = "ended"
# The first of these kinds is the cause, what follows is its consequence.
ORDER = ("refused", "failed", "hung", "lost")


@dataclass(frozen=True)
class Failure:
    """One rank's last word.

    Attributes:
        kind: "refused" (only the user can mend it), "failed" (an error of its own), "hung" (no progress), "lost" (another
            rank is gone), "ended" (no failure: the run finished, or stopped when it was asked to).
        message: one line.
        step: the step the rank was in, from 1; 0 before the first.
        rank: who wrote it.
    """

    kind: str
    message: str
    step: int
    rank: int


def record(kind: str, message: str, step: int) -> bool:
    """Write this rank's last word; the first one stands. False where nobody hears this one: without a supervisor or a writable
    folder, or after another."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return False
    rank = int(os.environ.get("RANK", "0"))
    path = Path(folder) / f"rank_{rank:05d}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_text(json.dumps(asdict(Failure(kind, message, step, rank))))
            beside.replace(path)
            return True
    return False


def read(folder: Path) -> list[Failure]:
    """The last words of an attempt, causes first."""
    found = []
    for path in sorted(folder.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Failure(**json.loads(path.read_text())))
    return sorted(found, key=lambda one: ORDER.index(one.kind) if one.kind in ORDER else len(ORDER))
