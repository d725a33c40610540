"""The report of a run: one self-contained HTML page."""

from .page import render, write_report

__all__ = ["render", "write_report"]
