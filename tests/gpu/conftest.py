"""A run that is cut off by its time limit leaves what it found: failures at once, and every outcome by name in the file that
TESTS_LOG names."""

import os
import sys
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", file=sys.stderr, flush=True)
    name = os.environ.get("TESTS_LOG")
    if name and "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        with Path(name).open("a", encoding="utf-8") as log:
            log.write(f"{report.outcome} {report.duration:.1f} s {report.nodeid}\n")
