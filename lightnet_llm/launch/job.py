"""What every kind of ready file is made from: one configuration, resolved and checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import RunConfig, dump_config, load_config
from ..config.launch import LaunchConfig
from ..errors import UserError

TRAINING = "lightnet_llm.training.main"
# Shell lines that wait for the command before them. A signal ends a wait, not the command: what traps one sets ``again``.
AWAITED = [
    "job=$!",
    "again=1",
    'while [ -n "$again" ]; do',
    "    again='' code=0",
    '    wait "$job" || code=$?',
    "done",
]


@dataclass(frozen=True)
class Job:
    """One run to be started elsewhere.

    Attributes:
        name: of the run and of the files.
        source: the configuration as given: a file or a preset's name.
        overrides: for the training, without those of ``launch``; the run resumes, since clusters start jobs again.
        config: resolved.
        given: all overrides as given.
        hostfile: hosts of the run, checked against ``config.launch``.
    """

    name: str
    source: str
    overrides: tuple[str, ...]
    config: RunConfig
    given: tuple[str, ...]
    hostfile: Path | None = None

    @property
    def launch(self) -> LaunchConfig:
        """Cluster and resources."""
        return self.config.launch

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.launch.nodes * self.launch.gpus_per_node

    @property
    def run_folder(self) -> str:
        """Relative to where the run starts, unless ``train.output`` is absolute."""
        return f"{self.config.train.output}/{self.name}"

    @property
    def is_preset(self) -> bool:
        """Whether the configuration comes with the installed package, so that any host can name it."""
        return not Path(self.source).is_file()

    def training(self, config: str | None = None) -> list[str]:
        """Arguments of the training main; ``config`` names a file that holds the resolved configuration."""
        if config is not None:
            return ["--config", config]
        return ["--config", self.source, *self.overrides]

    def quoted(self) -> list[str]:
        """The same as words of a shell, the first two in one."""
        return [f"--config {shlex.quote(self.source)}", *map(shlex.quote, self.overrides)]

    def resolved(self) -> str:
        """The configuration as one YAML file, with the overrides applied."""
        return dump_config(self.config)

    def setup(self) -> list[str]:
        """Shell lines that come first."""
        if self.launch.setup is not None:
            return self.launch.setup
        return [] if self.launch.image else [". .venv/bin/activate"]

    def exports(self) -> list[str]:
        """Shell lines that set the environment; quoted, so any value arrives as it is."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.launch.environment.items()]

    def written_by(self, kind: str) -> str:
        """The command that makes the file again."""
        command = shlex.join(["lightnet", "launch", self.source, *self.given, "--emit", kind])
        return " ".join(command.splitlines())  # it stands in a comment


def job_of(
    source: str, overrides: tuple[str, ...], hosts: dict[str, int] | None = None, hostfile: str | None = None
) -> Job:
    """Resolve a configuration for launching.

    Raises:
        UserError: in the configuration, or the host file does not fit it.
    """
    training = [item for item in overrides if not item.startswith("launch.")]
    if not any(item.startswith("train.resume=") for item in training):
        training.append("train.resume=auto")
    config = load_config(source, [*training, *(item for item in overrides if item.startswith("launch."))])
    assert config.train.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.train.name):
        raise UserError(
            f"train.name '{config.train.name}' names files and jobs here: use letters, digits and ._- alone"
        )
    if hosts is not None:
        nodes, gpus = config.launch.nodes, config.launch.gpus_per_node
        if len(hosts) != nodes or set(hosts.values()) != {gpus}:
            slots = ", ".join(f"{host} slots={n}" for host, n in hosts.items())
            raise UserError(
                f"hostfile {hostfile} has {len(hosts)} host(s) ({slots}), but the run wants launch.nodes {nodes} with "
                f"launch.gpus_per_node {gpus} each; set these, or change the file"
            )
    path = None if hostfile is None else Path(hostfile)
    return Job(config.train.name, source, tuple(training), config, overrides, path)


def lines(parts: Iterable[str]) -> str:
    """A file of these lines."""
    return "\n".join(parts) + "\n"


def wrapped(words: list[str], indent: str = "    ") -> str:
    """A shell command over several lines."""
    return f" \\\n{indent}".join(words)
