"""The command, for tests."""

from typing import Any

from click.testing import CliRunner

from lightnet_llm.cli import main


def run(*arguments: str) -> Any:
    """What comes of ``lightnet plan`` with these arguments."""
    return CliRunner().invoke(main, ["plan", *arguments])
