"""Failures are told at once: a run that is cut off by its time limit leaves them."""

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", file=sys.stderr, flush=True)
