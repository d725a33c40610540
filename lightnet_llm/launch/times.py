"""What the time from a run's command to the end of its first step goes into. Needs the standard library alone."""

from __future__ import annotations

import os
import time

VARIABLE = "LIGHTNET_LAUNCHED_AT"  # seconds since 1970 at which `lightnet train` began, or began again


class LaunchTimes:
    """Moments of one process, one after the other.

    Args:
        began: when the command did, in seconds since 1970; a later moment, by another host's clock, counts as now.
    """

    def __init__(self, began: float | None = None):
        now = time.time()
        self.began = now if began is None else min(began, now)
        self._last = self.began
        self.seconds: dict[str, float] = {}

    def mark(self, what: str) -> None:
        """What lies behind, since the last mark, was this."""
        now = time.time()
        self.seconds[what] = round(max(0.0, now - self._last), 3)
        self._last = now

    def taken(self) -> dict[str, dict[str, float]]:
        """Seconds by mark and their "total", as "launch_seconds", once; then nothing."""
        found, self.seconds = self.seconds, {}
        return {"launch_seconds": {**found, "total": round(sum(found.values()), 3)}} if found else {}


current = LaunchTimes()


def begin() -> None:
    """In a rank, before it imports anything: "processes" are the command's checks, launchers and Python itself."""
    global current
    try:
        current = LaunchTimes(float(os.environ[VARIABLE]))
    except (KeyError, ValueError):  # started by another launcher
        current = LaunchTimes()
    else:
        current.mark("processes")
