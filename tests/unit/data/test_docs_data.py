"""docs/data.md: every command in it is one that the command line takes, and its YAML file one that prep reads."""

import re
import shlex
from pathlib import Path

import click
import pytest

from lightnet_llm.cli import main
from lightnet_llm.config.prep import load_prep

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
LINES = re.findall(r"^    (lightnet (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
COMMANDS = [
    re.sub(r"\\\n\s*", "", line) for line in [*LINES, *re.findall(r"`(lightnet (?:prep|data|train) [^`]*)`", PAGE)]
]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "INPUT" not in c and "SRC" not in c])
def test_command_is_taken(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    group: click.Command = main
    context = click.Context(main)
    while isinstance(group, click.Group):
        name = words.pop(0)
        found = group.get_command(context, name)
        assert found is not None, name
        group = found
    group.make_context(group.name, words)  # raises what an unknown option or a missing argument raises


def test_all_commands_were_found() -> None:
    assert len(COMMANDS) >= 10 and {c.split()[1] for c in COMMANDS} == {"prep", "data", "train"}


def test_the_yaml_file_is_read(tmp_path: Path) -> None:
    text = re.search(r"^    # pile.yaml\n((?:    .*\n)+)", PAGE, re.MULTILINE)
    assert text is not None
    (tmp_path / "pile.yaml").write_text(re.sub(r"^    ", "", text[1], flags=re.MULTILINE))
    config = load_prep(str(tmp_path / "pile.yaml"))
    assert config.executor.kind == "slurm" and config.records.subset_field == "meta.pile_set_name"
