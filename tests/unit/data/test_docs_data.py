"""docs/data.md, images.md, bidirectional.md: every command is one that the command line takes, the YAML one that prep reads."""

import re
import shlex
from pathlib import Path

import click
import pytest

from lightnet_llm.cli import main
from lightnet_llm.config.prep import load_prep

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
IMAGES = (Path(__file__).parents[3] / "docs" / "images.md").read_text(encoding="utf-8")
BIDIRECTIONAL = (Path(__file__).parents[3] / "docs" / "bidirectional.md").read_text(encoding="utf-8")


def commands_of(page: str) -> list[str]:
    lines = re.findall(r"^    (lightnet (?:.*\\\n)*.*)$", page, re.MULTILINE)
    inline = re.findall(r"`(lightnet (?:prep|data|train) [^`]*)`", page)
    return [re.sub(r"\\\n\s*", "", line) for line in [*lines, *inline]]


COMMANDS = commands_of(PAGE)


@pytest.mark.parametrize(
    "command",
    [c for page in (PAGE, IMAGES, BIDIRECTIONAL) for c in commands_of(page) if "INPUT" not in c and "SRC" not in c],
)
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
    assert {c.split()[1] for c in commands_of(IMAGES)} >= {"train", "eval", "sample", "report"}
    assert {c.split()[1] for c in commands_of(BIDIRECTIONAL)} == {"prep", "train", "glue"}


def test_the_yaml_file_is_read(tmp_path: Path) -> None:
    text = re.search(r"^    # pile.yaml\n((?:    .*\n)+)", PAGE, re.MULTILINE)
    assert text is not None
    (tmp_path / "pile.yaml").write_text(re.sub(r"^    ", "", text[1], flags=re.MULTILINE))
    config = load_prep(str(tmp_path / "pile.yaml"))
    assert config.executor.kind == "slurm" and config.records.subset_field == "meta.pile_set_name"
